"""The parts of a sentence that are spoken differently from how they are written, and the words between them.

`SLOTS` maps a name to a function that draws one part, as a pair of its written and its spoken form.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from random import Random

from .number_words import (
    cardinal,
    decade,
    decimal,
    digits,
    ordinal,
    ordinal_suffix,
    plural,
    roman,
    year,
)

Pair = tuple[str, str]

_TITLES = {
    "Dr.": "doctor",
    "Mr.": "mister",
    "Mrs.": "missus",
    "Prof.": "professor",
    "Capt.": "captain",
    "Gen.": "general",
    "Sgt.": "sergeant",
}
_FIRST_NAMES = (
    "Anna Ben Carla David Emma Felix Grace Henry Irene Jack Karen Liam Maria Nora Oscar Paula Quinn Rosa Simon Tina "
    "Victor Wendy Yusuf Zoe Alice Bruno Clara Daniel Elena Frank Hannah Ivan Julia Kevin Laura Martin Olga Peter"
).split()
_SURNAMES = "Smith Jones Brown Taylor Wilson Evans Walker Wright Green Hall Clarke Young King Baker Garcia Chen".split()
_NAME_STARTS = "Ash Brook Cliff East Glen Hart Kings Lang Mill North Oak Red Stan Wal West Win Black Fair".split()
_NAME_ENDS = "field ford ham ley ton wood well worth bridge burn dale land".split()
_MONTHS = "January February March April May June July August September October November December".split()
_WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_ADJECTIVES = "old new small large red blue broken heavy quiet bright empty narrow famous strange wooden cheap".split()
_THINGS = (
    "bicycle lamp table guitar camera letter ticket painting carpet clock mirror piano basket blanket ladder suitcase "
    "kettle notebook umbrella violin hammer box coat chair"
).split()
_PLURALS = "books apples chairs tickets bottles stamps boxes eggs flowers coins shirts pencils letters lamps".split()
_PLACES = "market station library garden harbor museum school office bridge village bakery theater castle park".split()
_ANIMALS = "dog cat horse bird fox rabbit goat turtle".split()
_ADVERBS = "quietly slowly again together early late yesterday today".split()
_VERBS = "bought sold found painted repaired cleaned lost borrowed carried described forgot opened".split()
_ACRONYMS = "BBC FBI UN EU NHS MIT CEO USA".split()
_STREETS = {"St.": "street", "Ave.": "avenue", "Rd.": "road", "Blvd.": "boulevard"}
_ABBREVIATIONS = {
    "approx.": "approximately",
    "max.": "maximum",
    "min.": "minimum",
    "avg.": "average",
}
_CURRENCIES = {
    "$": ("dollar", "dollars", "cent", "cents"),
    "€": ("euro", "euros", "cent", "cents"),
    "£": ("pound", "pounds", "penny", "pence"),
}
_DISTANCES = {
    "km": ("kilometer", "kilometers"),
    "m": ("meter", "meters"),
    "cm": ("centimeter", "centimeters"),
    "mi": ("mile", "miles"),
    "ft": ("foot", "feet"),
}
_MASSES = {"kg": ("kilogram", "kilograms"), "g": ("gram", "grams"), "lb": ("pound", "pounds")}
_VOLUMES = {"ml": ("milliliter", "milliliters"), "L": ("liter", "liters"), "gal": ("gallon", "gallons")}
_SPEEDS = {"km/h": ("kilometer per hour", "kilometers per hour"), "mph": ("mile per hour", "miles per hour")}
_STORAGE = {"GB": ("gigabyte", "gigabytes"), "MB": ("megabyte", "megabytes"), "TB": ("terabyte", "terabytes")}
_FRACTIONS = {
    "1/2": "one half",
    "1/3": "one third",
    "2/3": "two thirds",
    "1/4": "one quarter",
    "3/4": "three quarters",
    "1/8": "one eighth",
    "5/8": "five eighths",
}


def _plain(word: str) -> Pair:
    return word, word.lower()


def _one_of(words: list[str]) -> Callable[[Random], Pair]:
    return lambda rng: _plain(rng.choice(words))


def _entry(table: dict[str, str]) -> Callable[[Random], Pair]:
    return lambda rng: rng.choice(list(table.items()))


def _name(rng: Random) -> Pair:
    return _plain(rng.choice(_NAME_STARTS) + rng.choice(_NAME_ENDS))


def _surname(rng: Random) -> Pair:
    return _plain(rng.choice(_SURNAMES)) if rng.random() < 0.5 else _name(rng)


def _person(rng: Random) -> Pair:
    kind = rng.random()
    if kind < 0.35:
        return _plain(rng.choice(_FIRST_NAMES))
    written, spoken = _surname(rng)
    if kind < 0.65:
        first = rng.choice(_FIRST_NAMES)
        return f"{first} {written}", f"{first.lower()} {spoken}"
    title, title_spoken = rng.choice(list(_TITLES.items()))
    return f"{title} {written}", f"{title_spoken} {spoken}"


def _integer(rng: Random, max_digits: int) -> int:
    """Returns a positive integer of 1 to `max_digits` digits, every number of digits as likely; some are round."""
    size = rng.randint(1, max_digits)
    number = rng.randrange(10 ** (size - 1), 10**size)
    if size > 2 and rng.random() < 0.3:
        number -= number % 10 ** rng.randint(1, size - 1)
    return number


def _number(rng: Random) -> Pair:
    number = _integer(rng, 3)
    return str(number), cardinal(number)


def _large_number(rng: Random) -> Pair:
    number = _integer(rng, 6) * rng.choice((1, 1, 10))
    return f"{number:,}", cardinal(number)


def _quantity(rng: Random) -> Pair:
    """Returns a number with up to two decimals, as it stands before a unit or a percent sign."""
    if rng.random() < 0.6:
        return _number(rng)
    number = f"{rng.randrange(100)}.{rng.choice((rng.randrange(1, 10), f'{rng.randrange(1, 100):02}'))}"
    return number, decimal(number)


def _money(rng: Random) -> Pair:
    sign, (singular, plurals, cent, cents) = rng.choice(list(_CURRENCIES.items()))
    kind = rng.random()
    if kind < 0.1:
        amount = f"{rng.randint(1, 9)}.{rng.randint(1, 9)}"
        scale = rng.choice(("million", "billion"))
        return f"{sign}{amount} {scale}", f"{decimal(amount)} {scale} {plurals}"
    hundredths = rng.randint(1, 99)
    fraction = f"{cardinal(hundredths)} {plural(str(hundredths), cent, cents)}"
    if kind < 0.15:
        return f"{sign}0.{hundredths:02}", fraction
    whole = _integer(rng, 5)
    spoken = f"{cardinal(whole)} {plural(str(whole), singular, plurals)}"
    if kind < 0.65:
        return f"{sign}{whole:,}", spoken
    return f"{sign}{whole:,}.{hundredths:02}", f"{spoken} and {fraction}"


def _year_number(rng: Random) -> int:
    return rng.randint(1700, 2049) if rng.random() < 0.5 else rng.randint(1980, 2030)


def _year(rng: Random) -> Pair:
    number = _year_number(rng)
    return str(number), year(number)


def _decade(rng: Random) -> Pair:
    number = 100 * rng.randint(17, 19) + 10 * rng.randint(2, 9)
    return f"{number}s", decade(number)


def _date(rng: Random) -> Pair:
    month, day, number = rng.randint(1, 12), rng.randint(1, 28), _year_number(rng)
    name = _MONTHS[month - 1]
    short = name if len(name) < 5 else f"{name[:3]}."
    kind = rng.randrange(6)
    if kind == 0:
        return f"{day} {name} {number}", f"the {ordinal(day)} of {name.lower()} {year(number)}"
    if kind == 1:
        return f"{name} {day}, {number}", f"{name.lower()} {ordinal(day)} {year(number)}"
    if kind == 2:
        return f"{number}-{month:02}-{day:02}", f"{name.lower()} {ordinal(day)} {year(number)}"
    if kind == 3:
        return f"{day} {short}", f"the {ordinal(day)} of {name.lower()}"
    if kind == 4:
        return f"{short} {day}", f"{name.lower()} {ordinal(day)}"
    weekday = rng.choice(_WEEKDAYS)
    return f"{weekday}, {day} {name}", f"{weekday.lower()} the {ordinal(day)} of {name.lower()}"


def _time(rng: Random) -> Pair:
    minute = rng.choice((0, 15, 30, 45, rng.randrange(60), rng.randrange(60)))
    spoken_minute = f" oh {cardinal(minute)}" if 0 < minute < 10 else f" {cardinal(minute)}" if minute else ""
    if rng.random() < 0.3:
        hour = rng.randint(13, 23)
        return f"{hour}:{minute:02}", cardinal(hour) + (spoken_minute or " hundred")
    hour, half = rng.randint(1, 12), rng.choice("ap")
    written = str(hour) if minute == 0 and rng.random() < 0.5 else f"{hour}:{minute:02}"
    return f"{written} {half}.m.", f"{cardinal(hour)}{spoken_minute} {half} m"


def _measure(units: dict[str, tuple[str, str]]) -> Callable[[Random], Pair]:
    def measure(rng: Random) -> Pair:
        unit, (singular, plurals) = rng.choice(list(units.items()))
        written, spoken = _quantity(rng)
        return f"{written} {unit}", f"{spoken} {plural(written, singular, plurals)}"

    return measure


def _temperature(rng: Random) -> Pair:
    number, (scale, name) = rng.randint(-40, 110), rng.choice((("C", "celsius"), ("F", "fahrenheit")))
    return f"{number} °{scale}", f"{cardinal(number)} {plural(str(number), 'degree', 'degrees')} {name}"


def _ordinal(rng: Random) -> Pair:
    number = rng.randint(1, 120)
    return f"{number}{ordinal_suffix(number)}", ordinal(number)


def _percent(rng: Random) -> Pair:
    number = str(rng.randint(1, 100)) if rng.random() < 0.5 else f"{rng.randrange(100)}.{rng.randrange(1, 10)}"
    return f"{number}%", f"{decimal(number)} percent"


def _range(rng: Random) -> Pair:
    low = rng.randint(1, 60)
    high = low + rng.randint(1, 30)
    return f"{low}-{high}", f"{cardinal(low)} to {cardinal(high)}"


def _score(rng: Random) -> Pair:
    home, away = rng.randrange(8), rng.randrange(8)
    return f"{home}-{away}", f"{cardinal(home)} to {cardinal(away)}"


def _digit_groups(rng: Random, *sizes: int) -> list[str]:
    return ["".join(rng.choice(string.digits) for _ in range(size)) for size in sizes]


def _phone(rng: Random) -> Pair:
    kind = rng.randrange(3)
    if kind == 0:
        written = "-".join(_digit_groups(rng, 3, 4))
    elif kind == 1:
        written = "-".join(_digit_groups(rng, 3, 3, 4))
    else:
        written = f"+{rng.randint(1, 9)}{rng.randint(0, 9)} " + " ".join(_digit_groups(rng, 2, 4, 4))
        return written, "plus " + digits(written)
    return written, digits(written)


def _code(rng: Random) -> Pair:
    written = "".join(_digit_groups(rng, rng.randint(5, 8)))
    return written, digits(written)


def _flight(rng: Random) -> Pair:
    letters = rng.choice(string.ascii_uppercase) + rng.choice(string.ascii_uppercase)
    number = str(rng.randint(100, 999))
    return f"{letters} {number}", f"{' '.join(letters.lower())} {digits(number)}"


def _acronym(rng: Random) -> Pair:
    letters = rng.choice(_ACRONYMS)
    return letters, " ".join(letters.lower())


def _roman(rng: Random) -> Pair:
    number = rng.randint(1, 20)
    return roman(number), cardinal(number)


def _address(rng: Random) -> Pair:
    number, (name, name_spoken), (kind, kind_spoken) = rng.randint(1, 199), _name(rng), _entry(_STREETS)(rng)
    return f"{number} {name} {kind}", f"{cardinal(number)} {name_spoken} {kind_spoken}"


SLOTS: dict[str, Callable[[Random], Pair]] = {
    "person": _person,
    "town": _name,
    "adjective": _one_of(_ADJECTIVES),
    "thing": _one_of(_THINGS),
    "things": _one_of(_PLURALS),
    "place": _one_of(_PLACES),
    "animal": _one_of(_ANIMALS),
    "adverb": _one_of(_ADVERBS),
    "verb": _one_of(_VERBS),
    "weekday": _one_of(_WEEKDAYS),
    "about": _entry(_ABBREVIATIONS),
    "fraction": _entry(_FRACTIONS),
    "number": _number,
    "large": _large_number,
    "money": _money,
    "year": _year,
    "decade": _decade,
    "date": _date,
    "time": _time,
    "distance": _measure(_DISTANCES),
    "mass": _measure(_MASSES),
    "volume": _measure(_VOLUMES),
    "speed": _measure(_SPEEDS),
    "storage": _measure(_STORAGE),
    "temperature": _temperature,
    "ordinal": _ordinal,
    "percent": _percent,
    "range": _range,
    "score": _score,
    "phone": _phone,
    "code": _code,
    "flight": _flight,
    "acronym": _acronym,
    "roman": _roman,
    "address": _address,
}
