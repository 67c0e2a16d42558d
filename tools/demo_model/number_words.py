"""English words for numbers, in the American style without "and": 1250 is "one thousand two hundred fifty"."""

from __future__ import annotations

from functools import cache

from num2words import num2words


@cache
def cardinal(number: int, to: str = "cardinal") -> str:
    """Returns "twenty one" for 21; to: the kind of number, as num2words calls it."""
    return num2words(number, to=to).replace(" and ", " ").replace("-", " ").replace(",", "")


def ordinal(number: int) -> str:
    """Returns "twenty first" for 21."""
    return cardinal(number, to="ordinal")


def ordinal_suffix(number: int) -> str:
    """Returns the two letters that follow the digits: 1st, 2nd, 3rd, 11th."""
    return cardinal(number, to="ordinal_num")[-2:]


def digits(text: str) -> str:
    """Returns the digits one by one and nothing else: "five five five zero one" for "555-01"."""
    return " ".join(cardinal(int(character)) for character in text if character.isdigit())


def decimal(text: str) -> str:
    """Returns "twelve point zero five" for "12.05"; accepts a comma between thousands."""
    whole, _, fraction = text.replace(",", "").partition(".")
    return cardinal(int(whole)) + (f" point {digits(fraction)}" if fraction else "")


def year(number: int) -> str:
    """Returns "nineteen oh five" for 1905, "two thousand seven" for 2007, "twenty twenty one" for 2021."""
    return cardinal(number, to="year")


def decade(number: int) -> str:
    """Returns "nineteen eighties" for 1980, written 1980s."""
    return year(number)[:-1] + "ies"


def plural(count: str, singular: str, plurals: str) -> str:
    """Returns `singular` for the written count "1", `plurals` for others."""
    return singular if count == "1" else plurals


def roman(number: int) -> str:
    """Returns the Roman numeral of a number below 40."""
    numeral = ""
    for value, letters in ((10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")):
        numeral += letters * (number // value)
        number %= value
    return numeral
