"""Dates and times of day, whose signs are no arithmetic: `2024-01-02` is not 2021, and `3:05` is no ratio."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from cepo.answers.characters import plain_characters

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = (
    r"(?P<month>jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)\.?"
)
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_YEAR = r"(?P<year>\d{4})"
_WEEKDAY = re.compile(r"(?:mon|tues|wednes|thurs|fri|satur|sun)day,?\s+", re.IGNORECASE)
_DATES = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"{_YEAR}(?P<sign>[-/.])(?P<month>\d{{1,2}})(?P=sign)(?P<day>\d{{1,2}})",
        rf"{_YEAR}\s*年\s*(?P<month>\d{{1,2}})\s*月(?:\s*(?P<day>\d{{1,2}})\s*[日号])?",
        rf"{_MONTH}\s+{_DAY}(?:,\s*|\s+){_YEAR}",
        rf"{_DAY}\s+(?:of\s+)?{_MONTH},?\s+{_YEAR}",
        rf"{_DAY}-{_MONTH}-(?P<year>\d{{4}}|\d{{2}})",
        rf"{_MONTH},?\s+{_YEAR}",
        rf"{_MONTH}\s+{_DAY}",
        rf"{_DAY}\s+(?:of\s+)?{_MONTH}",
        _MONTH,
    )
)
_DATE_IN_DIGITS = re.compile(
    r"(?P<first>\d{1,2})\s*(?P<sign>[-/.])\s*(?P<second>\d{1,2})\s*(?P=sign)\s*(?P<year>\d{4}|(?<=[/])\s*\d{2})"
)
_TIME = re.compile(
    r"(?P<hour>\d{1,2})(?::|\.(?=\d\d\s*[ap]\.))(?P<minute>\d{2}|0)(?::(?P<second>\d{2}))?\s*(?:(?P<half>[ap])\.?\s?m\.?)?",
    re.IGNORECASE,
)
_FULL_HOUR = re.compile(r"(?P<hour>\d{1,2})\s*(?:(?P<half>[ap])\.?\s?m\.?|o'clock)", re.IGNORECASE)
_TO = re.compile(r"\s*(?:-+|\bto\b)\s*")
_MARKUP = re.compile(r"\\(?:text|textrm|mathrm|textbf|mathbf)(?![A-Za-z])|\\[,;: ]|[${}~]|\*\*")
_NOON = 12
_HOURS_OF_DAY = 24


@dataclass(frozen=True)
class Date:
    """A date without a year (None) or a day (0), if the text names none.

    Attributes:
        order: `mdy` or `dmy` for a date in digits that ends with the year, else an empty text.
    """

    year: int | None
    month: int
    day: int
    order: str = ""


@dataclass(frozen=True)
class Time:
    """A time of day on a clock of 12 or 24 hours.

    Attributes:
        half: `a` or `p` if the time names the half of the day, else an empty text.
        is_padded: whether an hour or minute below 10 has two digits, as no term of a ratio has.
    """

    hour: int
    minute: int
    second: int
    half: str = ""
    is_padded: bool = False

    @property
    def is_certain(self) -> bool:
        """Whether the text that stated it can be no ratio."""
        return bool(self.half) or self.is_padded

    @property
    def is_no_reduced_ratio(self) -> bool:
        """Whether a ratio of hour and minute could be reduced: a right answer `10:30` is a time, while `3:10` may be a ratio."""
        return self.is_certain or self.minute == 0 or math.gcd(self.hour, self.minute) > 1


def date_of(text: str) -> Date | None:
    """Returns the date that a text states in digits or words, or None. Of `7/4/2021` the month comes first if it can."""
    plain = _plain(text).removesuffix(".")
    in_digits = _DATE_IN_DIGITS.fullmatch(plain)
    if in_digits is not None:
        first = int(in_digits["first"])
        second = int(in_digits["second"])
        year = int(in_digits["year"])
        return _valid_date(year, second, first, "dmy") if first > 12 else _valid_date(year, first, second, "mdy")
    plain = _WEEKDAY.sub("", plain, count=1)
    for pattern in _DATES:
        match = pattern.fullmatch(plain)
        if match is not None:
            parts = match.groupdict()
            month = parts["month"].lower()
            month_number = int(month) if month.isdigit() else _MONTHS.index(month[:3]) + 1
            written_year = parts.get("year")
            year = None if written_year is None else int(written_year)
            return _valid_date(year, month_number, int(parts.get("day") or 0), "")
    return None


def same_date(first: Date, second: Date) -> bool:
    """Returns whether two dates are one; years may lack their century, and digits are not read in two orders."""
    if first.order and second.order and first.order != second.order:
        return False
    if (first.month, first.day) != (second.month, second.day):
        return False
    if first.year is None or second.year is None:
        return first.year == second.year
    is_short = min(first.year, second.year) < 100
    return first.year % 100 == second.year % 100 if is_short else first.year == second.year


def time_of(text: str) -> Time | None:
    """Returns the time of day that a text states, or None; `3:30` may as well be a ratio."""
    plain = _plain(text)
    match = _TIME.fullmatch(plain) or _TIME.fullmatch(plain.removesuffix(".")) or _FULL_HOUR.fullmatch(plain)
    if match is None:
        return None
    parts = match.groupdict("")
    hour = parts["hour"]
    minute = parts.get("minute", "0")
    has_padded_minute = len(minute) > 1 and minute.startswith("0")
    return _valid_time(
        hour=int(hour),
        minute=int(minute),
        second=int(parts.get("second") or 0),
        half=parts["half"].lower(),
        is_padded=hour.startswith("0") or has_padded_minute,
    )


def ends_of_time_range(text: str) -> tuple[Time, Time] | None:
    """Returns the times from which and to which `10:00 - 11:30 a.m.` goes; None if the text is no such range."""
    first, *later_times = [time_of(side) for side in _TO.split(_plain(text))]
    last = later_times[0] if len(later_times) == 1 else None
    return None if first is None or last is None else (first, last)


def same_time(first: Time, second: Time) -> bool:
    """Returns whether two times are one; one of them may lack `am` or `pm`."""
    if replace(first, is_padded=False) == replace(second, is_padded=False):
        return True
    is_half_of_one_known = bool(first.half) != bool(second.half)
    return is_half_of_one_known and not _in_24_hours(first).isdisjoint(_in_24_hours(second))


def _plain(text: str) -> str:
    plain = _MARKUP.sub(" ", plain_characters(text)).strip().removesuffix(",").strip()
    return " ".join(plain.split())


def _valid_date(year: int | None, month: int, day: int, order: str) -> Date | None:
    is_valid = 1 <= month <= 12 and 0 <= day <= 31
    return Date(year, month, day, order) if is_valid else None


def _valid_time(hour: int, minute: int, second: int, half: str, is_padded: bool) -> Time | None:
    is_valid_hour = 1 <= hour <= _NOON if half else hour < _HOURS_OF_DAY
    if not is_valid_hour or minute >= 60 or second >= 60:
        return None
    return Time(hour, minute, second, half, is_padded)


def _in_24_hours(time: Time) -> set[tuple[int, int, int]]:
    """Returns the times on a clock of 24 hours that a time may mean: both halves of the day if it names none."""
    if time.half:
        first_hour = _NOON if time.half == "p" else 0
        return {(first_hour + time.hour % _NOON, time.minute, time.second)}
    hours = {time.hour}
    if 1 <= time.hour <= _NOON:  # no clock of 12 hours has an hour 0
        hours.add((time.hour + _NOON) % _HOURS_OF_DAY)
    return {(possible_hour, time.minute, time.second) for possible_hour in hours}
