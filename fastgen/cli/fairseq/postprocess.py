"""From arrays to the lines of fairseq-generate, and to scores: what a worker process does.

S- and T- are source and target, H- and D- a hypothesis before and after detokenisation with its score, P- the scores
of its tokens, A- its alignment, I- the number of refinement steps, E- what it was after each of them.

Scores are made in parts that add up to exactly what fairseq's scorers give for the whole: BLEU's counts add up; so does
what sacrebleu and WER keep of a sentence (its tokenised text; its errors and its length). Every other scorer is given
the sentences themselves, in order, where the parts meet.

Tests: tests/cli/fairseq/test_cli_fairseq_output.py
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from fairseq import scoring, utils
from fairseq.data import Dictionary
from fairseq.scoring.bleu import BleuStat, SacrebleuScorer, Scorer
from fairseq.scoring.wer import WerScorer
from fairseq.tokenizer import tokenize_line

from fastgen.cli.fairseq.hypotheses import Hypothesis, Sentence


class Postprocessor:
    """Turns sentences into text as the flags of the run say.

    The dictionaries grow by the words of the texts that are scored, as they do in fairseq-generate. That is seen only
    in scores, which depend on which numbers are equal, not on what they are.
    """

    def __init__(self, cfg: Any, task: Any, src_dict: Dictionary | None, tgt_dict: Dictionary) -> None:
        torch.set_num_threads(1)  # the cores belong to the model
        self.generation = Namespace(**cfg.generation)
        self.post_process, self.printed = cfg.common_eval.post_process, not cfg.common_eval.quiet
        self.src_dict = src_dict
        self.tgt_dict = tgt_dict
        self.align_dict = utils.load_align_dict(cfg.generation.replace_unk)
        self.tokenizer = task.build_tokenizer(cfg.tokenizer)
        self.bpe = task.build_bpe(cfg.bpe)
        self.scorer = scorer_in_parts(scoring.build_scorer(cfg.scoring, tgt_dict))

    def __call__(self, task: tuple[list[Sentence], set[int]]) -> tuple[str, dict[str, Any]]:
        """The lines of some sentences and what they add to the score.

        The numbers beside the sentences are those of symbols that are not part of a text.
        """
        sentences, ignored = task
        lines = [line for sentence in sentences for line in self._lines(sentence, ignored)]
        return "".join(f"{line}\n" for line in lines), take_part(self.scorer)

    def _lines(self, sentence: Sentence, ignored: set[int]) -> Iterator[str]:
        number = sentence.id
        source, target_tokens, target = self._source_and_target(sentence, ignored)
        if self.printed and self.src_dict is not None:
            yield f"S-{number}\t{source}"
        if self.printed and target is not None:
            yield f"T-{number}\t{target}"
        for place, hypothesis in enumerate(sentence.hypotheses):
            text = _string(self.tgt_dict, hypothesis.tokens, self.post_process, extra_symbols_to_ignore=ignored)
            if self.align_dict is not None:
                unk = self.tgt_dict.unk_string()
                text = utils.replace_unk(text, source, hypothesis.alignment, self.align_dict, unk)
            detokenized = self._decode(text)
            if self.printed:
                yield f"H-{number}\t{hypothesis.score}\t{text}"
                yield f"D-{number}\t{hypothesis.score}\t{detokenized}"
                yield from self._details(number, hypothesis)
            if place == 0 and target is not None:
                self._score(target_tokens, target, hypothesis.tokens, detokenized)

    def _source_and_target(self, sentence: Sentence, ignored: set[int]) -> tuple[str, np.ndarray | None, str | None]:
        """The source's text, the target's tokens and the target's text."""
        pad, source, target, tokens = self.tgt_dict.pad(), "", None, None
        if sentence.target is not None:
            tokens = sentence.target[sentence.target != pad].astype(np.int32)
        if sentence.original is not None:
            source, target = sentence.original
        else:
            if self.printed and self.src_dict is not None and sentence.source is not None:
                source = _string(self.src_dict, sentence.source[sentence.source != pad], self.post_process)
            if tokens is not None:
                options = {"escape_unk": True, "extra_symbols_to_ignore": ignored}
                target = _string(self.tgt_dict, tokens, self.post_process, **options)
        return self._decode(source), tokens, None if tokens is None else self._decode(target)

    def _details(self, number: int, hypothesis: Hypothesis) -> Iterator[str]:
        yield f"P-{number}\t" + " ".join(f"{score:.4f}" for score in hypothesis.positional_scores.tolist())
        kind = self.generation.print_alignment
        if kind == "hard":
            yield f"A-{number}\t" + " ".join(f"{source}-{target}" for source, target in hypothesis.alignment)
        if kind == "soft":
            yield f"A-{number}\t" + " ".join(",".join(probabilities) for probabilities in hypothesis.alignment)
        if hypothesis.step is not None:
            yield f"I-{number}\t{hypothesis.step}"
        for step, tokens in enumerate(hypothesis.history or ()):
            yield f"E-{number}_{step}\t{_string(self.tgt_dict, tokens, None)}"

    def _score(self, target_tokens: np.ndarray, target: str, tokens: np.ndarray, hypothesis: str) -> None:
        if hasattr(self.scorer, "add_string"):
            self.scorer.add_string(target, hypothesis)
            return
        if self.align_dict is not None or self.post_process is not None:
            target_tokens, tokens = self._encode(target), self._encode(hypothesis)
        self.scorer.add(torch.from_numpy(target_tokens), torch.from_numpy(tokens))

    def _decode(self, text: str) -> str:
        if self.bpe is not None:
            text = self.bpe.decode(text)
        return text if self.tokenizer is None else self.tokenizer.decode(text)

    def _encode(self, text: str) -> np.ndarray:
        """The words of a text as numbers."""
        if type(self.tgt_dict).encode_line is not Dictionary.encode_line:
            return self.tgt_dict.encode_line(text, add_if_not_exist=True).numpy()
        # The same without a tensor that is filled number by number, which takes most of encode_line's time.
        numbers = [self.tgt_dict.add_symbol(word) for word in tokenize_line(text)]
        return np.array([*numbers, self.tgt_dict.eos()], dtype=np.int32)


def _string(dictionary: Dictionary, tokens: np.ndarray, post_process: str | None, **options: Any) -> str:
    """A dictionary's string; from plain numbers, unless it is a kind that may insist on a tensor."""
    if tokens.ndim == 1 and type(dictionary).string is Dictionary.string:
        return dictionary.string(tokens.tolist(), post_process, **options)
    return dictionary.string(torch.from_numpy(tokens), post_process, **options)


class Pairs:
    """Keeps the sentences for a scorer whose parts do not add up."""

    def __init__(self) -> None:
        self.pairs: list[tuple[str, str]] = []

    def add_string(self, ref: str, pred: str) -> None:
        """What a scorer that compares strings is called with."""
        self.pairs.append((ref, pred))


# What adds up of a scorer, and what it is before the first sentence.
_SUMS: dict[type, dict[str, Any]] = {
    Scorer: {name: 0 for name, _ in BleuStat._fields_},
    SacrebleuScorer: {"ref": [], "pred": []},
    WerScorer: {"distance": 0, "ref_length": 0},
    Pairs: {"pairs": []},
}


def unsupported_scores(name: str) -> list[str]:
    """Why `--scoring NAME` cannot be done in parts."""
    scorer = scoring.SCORER_REGISTRY.get(name)
    if scorer is None or scorer is Scorer or hasattr(scorer, "add_string"):
        return []
    return [f"--scoring {name} compares token numbers (supported: bleu, and scorers that compare strings)"]


def scorer_in_parts(scorer: Any) -> Any:
    """What a worker process gives its sentences to, instead of `scorer`."""
    return scorer if type(scorer) in _SUMS else Pairs()


def take_part(scorer: Any) -> dict[str, Any]:
    """What a worker's scorer was given since the last call."""
    owner = getattr(scorer, "stat", scorer)  # where BLEU counts
    part = {name: getattr(owner, name) for name in _SUMS[type(scorer)]}
    for name, empty in _SUMS[type(scorer)].items():
        setattr(owner, name, type(empty)())
    return part


def add_part(scorer: Any, part: dict[str, Any]) -> None:
    """Adds a part to the scorer of the whole; parts come in the order of the sentences."""
    for target, hypothesis in part.pop("pairs", ()):
        scorer.add_string(target, hypothesis)
    owner = getattr(scorer, "stat", scorer)
    for name, value in part.items():
        total = getattr(owner, name)
        total += value  # in place for lists
        setattr(owner, name, total)
