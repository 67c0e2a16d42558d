"""English words for numbers, in the American style without "and": 1250 is "one thousand two hundred fifty"."""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


_ONES = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS = _words("zero ten twenty thirty forty fifty sixty seventy eighty ninety")
_SCALES = ((10**9, "billion"), (10**6, "million"), (10**3, "thousand"), (10**2, "hundred"))
_IRREGULAR_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}


def cardinal(number: int) -> str:
    """Returns "twenty one" for 21; takes integers between -10**12 and 10**12, both excluded."""
    if abs(number) >= 10**12:
        raise ValueError(f"number is {number}; accepted: integers between -10**12 and 10**12")
    if number < 0:
        return "minus " + cardinal(-number)
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens] + (f" {_ONES[ones]}" if ones else "")
    size, name = next(scale for scale in _SCALES if number >= scale[0])
    count, rest = divmod(number, size)
    return f"{cardinal(count)} {name}" + (f" {cardinal(rest)}" if rest else "")


def ordinal(number: int) -> str:
    """Returns "twenty first" for 21."""
    head, _, last = cardinal(number).rpartition(" ")
    if last in _IRREGULAR_ORDINALS:
        last = _IRREGULAR_ORDINALS[last]
    else:
        last = last[:-1] + "ieth" if last.endswith("y") else last + "th"
    return f"{head} {last}".strip()


def ordinal_suffix(number: int) -> str:
    """Returns the two letters that follow the digits: 1st, 2nd, 3rd, 11th."""
    if 10 <= number % 100 <= 20:
        return "th"
    return {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")


def digits(text: str) -> str:
    """Returns the digits one by one and nothing else: "five five five zero one" for "555-01"."""
    return " ".join(_ONES[int(character)] for character in text if character.isdigit())


def decimal(text: str) -> str:
    """Returns "twelve point zero five" for "12.05"; accepts a comma between thousands."""
    whole, _, fraction = text.replace(",", "").partition(".")
    return cardinal(int(whole)) + (f" point {digits(fraction)}" if fraction else "")


def year(number: int) -> str:
    """Returns "nineteen oh five" for 1905, "two thousand seven" for 2007, "twenty twenty one" for 2021."""
    century, rest = divmod(number, 100)
    if century % 10 == 0 and rest < 10:
        return cardinal(number)
    if rest == 0:
        return f"{cardinal(century)} hundred"
    return f"{cardinal(century)} {'oh ' if rest < 10 else ''}{cardinal(rest)}"


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
