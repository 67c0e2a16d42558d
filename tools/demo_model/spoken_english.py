"""Pairs of a written English line and the same line as it is spoken, made by rules.

"Dr. Smith paid $1,250.50 at 4:15 p.m." is "doctor smith paid one thousand two hundred fifty dollars and fifty cents
at four fifteen p m": lower case, no punctuation, every number, sign and abbreviation in words. The pairs train and
test the demo model; a line has exactly one right output.
"""

from __future__ import annotations

import string
from random import Random

from .slots import SLOTS, Pair

MAX_SPOKEN_WORDS = 100
HELD_OUT_SEED = 20_000
_HELD_OUT_LINES = 2_000

# Very short lines, at most one to an output.
_SHORT = (
    "see page {number}",
    "thank you, {person}",
    "{money}, please",
    "call {phone}",
    "it is {time} {adverb}",
    "chapter {roman}",
    "only {percent} left",
    "{date}",
    "{person} won {score}",
    "the {adjective} {thing}",
)

# Clauses that are mostly copied: nothing but names and titles to rewrite.
_PLAIN = (
    "{person} {verb} the {adjective} {thing}",
    "{person} {verb} the {things} {adverb}",
    "{person} and {person} walked to the {place} {adverb}",
    "the {adjective} {animal} slept under the {thing}",
    "one {adjective} {animal} ran across the {place}",
    "the {place} in {town} was {adjective} and {adjective}",
    "{person} gave the {thing} and the {things} to {person}",
    "nobody saw the {adjective} {animal} near the {place}",
    "{person} asked {person} about the {thing}",
    "the {things} in the {place} looked {adjective}",
)

# Clauses with one item or more, about something done at a time and a place.
_EVENTS = (
    "{person} paid {money}",
    "{person} paid {money} for the {thing}",
    "{person} sold {number} {things} for {money}",
    "the {place} in {town} raised {money}",
    "{person} carried {mass} of {things}",
    "{person} drove {distance} from {town} to {town}",
    "the wind reached {speed} in {town}",
    "the temperature in {town} fell to {temperature}",
    "sales of {things} rose by {percent} to {large}",
    "prices fell {percent} in {town}",
    "{person} finished {ordinal} in the race",
    "the {acronym} sent {large} {things} to {town}",
    "{person} counted {large} {things}",
    "{town} beat {town} {score}",
    "{person} read chapter {roman} of the book",
    "{fraction} of the {things} arrived",
    "{person} ordered {volume} of paint",
)

# Clauses with one item or more that stand by themselves.
_FACTS = (
    "the {adjective} {thing} cost {money}",
    "the {thing} weighs {mass}",
    "the {place} is {distance} from the {place}",
    "the {animal} ran at {speed}",
    "it was {temperature} at {time}",
    "{person} added {volume} of water and {fraction} of the {things}",
    "{percent} of the people in {town} have a {animal}",
    "the {ordinal} {thing} was {adjective}",
    "it was the {ordinal} visit of {person}",
    "{person} lives at {address}",
    "the {place} at {address} opened in {year}",
    "you can call {person} at {phone}",
    "the number of the {place} is {phone}",
    "the {acronym} was founded in {year}",
    "the population of {town} is {large}",
    "pages {range} are about the {animal}",
    "flight {flight} leaves at {time} from gate {number}",
    "the meeting is on {date} at {time} in room {number}",
    "order No. {number} came on {date}",
    "the code of the {place} is {code}",
    "{person} was born on {date}",
    "the {things} were popular in the {decade}",
    "the {place} opens at {time} on {weekday}",
    "the file takes {storage}",
    "the program needs {about} {storage} for {number} {things}",
    "the {about} price of the {things} is {money}",
    "the bridge is {about} {distance} long",
)

# Said at the end of an event.
_ENDINGS = (
    "on {date}",
    "on {date} at {time}",
    "on {weekday}",
    "in {year}",
    "in the {decade}",
    "at {time}",
    "near the {place}",
    "together with {person}",
    "after {number} days",
    "for the {ordinal} time",
    "near {town}",
    "in front of {address}",
)

_CONJUNCTIONS = (" and ", ", and ", ", but ", "; ", ", while ", ", so ", ", because ")


def _fill(rng: Random, template: str) -> Pair:
    written, spoken = "", ""
    for literal, slot, _, _ in string.Formatter().parse(template):
        written += literal
        spoken += literal.replace("No.", "number").replace(",", "").replace(";", "")
        if slot is not None:
            slot_written, slot_spoken = SLOTS[slot](rng)
            written += slot_written
            spoken += slot_spoken
    return written, " ".join(spoken.split())


def _clause(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.25:
        return rng.choice(_PLAIN)
    if kind < 0.6:
        return rng.choice(_FACTS)
    return f"{rng.choice(_EVENTS)} {rng.choice(_ENDINGS)}"


def _sentence(rng: Random, clauses: int) -> Pair:
    template = _clause(rng)
    for _ in range(clauses - 1):
        template += rng.choice(_CONJUNCTIONS) + _clause(rng)
    written, spoken = _fill(rng, template)
    # An abbreviation brings its own full stop: "at 4 p.m."
    if not written.endswith(".") and rng.random() < 0.9:
        written += "."
    return written[0].upper() + written[1:], spoken


def make_pair(rng: Random) -> Pair:
    """Returns a (written, spoken) pair of at most `MAX_SPOKEN_WORDS` spoken words; the same for the same `rng`.

    One line in ten is a few words long; the others have one to five clauses, short lines being more frequent.
    """
    if rng.random() < 0.1:
        written, spoken = _fill(rng, rng.choice(_SHORT))
        return written[0].upper() + written[1:], spoken
    clauses = rng.choice((1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 5))
    while True:
        if clauses > 1 and rng.random() < 0.4:
            sentences = [_sentence(rng, 1), _sentence(rng, clauses - 1)]
        else:
            sentences = [_sentence(rng, clauses)]
        written, spoken = (" ".join(parts) for parts in zip(*sentences, strict=True))
        if len(spoken.split()) <= MAX_SPOKEN_WORDS:
            return written, spoken


def held_out_pairs() -> list[Pair]:
    """Returns pairs that no training run sees, all different; the first 500 are sample.txt and sample.ref.txt."""
    rng = Random(HELD_OUT_SEED)
    pairs: dict[str, str] = {}
    while len(pairs) < _HELD_OUT_LINES:
        written, spoken = make_pair(rng)
        pairs.setdefault(written, spoken)
    return list(pairs.items())
