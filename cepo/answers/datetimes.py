"""Reads dates and times of day, whose signs are no arithmetic: `2024-01-02` is not 2021, and `3:05` is no ratio."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cepo.answers.lexer import plain_characters

_DATE = re.compile(r"(?P<year>\d{4})(?P<sign>[-/.])(?P<month>\d{2})(?P=sign)(?P<day>\d{2})")
_TIME = re.compile(
    r"(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2}))?\s*(?:(?P<half>[ap])\.?\s?m\.?)?", re.IGNORECASE
)
_FULL_HOUR = re.compile(r"(?P<hour>\d{1,2})\s*(?P<half>[ap])\.?\s?m\.?", re.IGNORECASE)
_MARKUP = re.compile(r"\\(?:text|textrm|mathrm|textbf|mathbf)(?![A-Za-z])|\\[,;: ]|[${}~]")
_NOON = 12
_HOURS_OF_DAY = 24


@dataclass(frozen=True)
class Moment:
    """A date, or a time of day.

    Attributes:
        numbers: year, month and day; or hour, minute and second on a clock of 12 or 24 hours.
        half: `a` or `p` if the time names the half of the day, else an empty text.
    """

    numbers: tuple[int, int, int]
    half: str = ""
    is_date: bool = False


def moment_of(text: str) -> Moment | None:
    """Returns the date (year, month, day in digits) or the time of day that a text states, or None.

    A time has `am` or `pm`, or an hour or minutes below 10 with two digits (`07:15`, `3:05`); else it may as well be a
    ratio (`3:30`).
    """
    moment = _date_or_time(text)
    if moment is None or moment.is_date or moment.half:
        return moment
    hour_and_minute = _plain(text).split(":")[:2]
    is_padded = any(len(number) > 1 and number.startswith("0") for number in hour_and_minute)
    return moment if is_padded else None


def same_moment(prediction: str, gold: str) -> bool:
    """Returns whether a prediction states the date or the time of a gold answer; it may lack `am` or `pm`."""
    first = _date_or_time(prediction)
    second = _date_or_time(gold)
    if first is None or second is None or first.is_date != second.is_date:
        return False
    if first == second:
        return True
    is_half_of_one_known = bool(first.half) != bool(second.half)
    return is_half_of_one_known and not _in_24_hours(first).isdisjoint(_in_24_hours(second))


def _plain(text: str) -> str:
    return _MARKUP.sub(" ", plain_characters(text)).strip().removesuffix(",").strip()


def _date_or_time(text: str) -> Moment | None:
    plain = _plain(text)
    plain_without_point = plain.removesuffix(".")
    date = _DATE.fullmatch(plain_without_point)
    if date is not None:
        return _valid_date(int(date["year"]), int(date["month"]), int(date["day"]))
    time = _TIME.fullmatch(plain) or _TIME.fullmatch(plain_without_point)
    if time is not None:
        return _valid_time(int(time["hour"]), int(time["minute"]), int(time["second"] or 0), time["half"])
    full_hour = _FULL_HOUR.fullmatch(plain)
    if full_hour is not None:
        return _valid_time(int(full_hour["hour"]), 0, 0, full_hour["half"])
    return None


def _valid_date(year: int, month: int, day: int) -> Moment | None:
    is_valid = 1 <= month <= 12 and 1 <= day <= 31
    return Moment((year, month, day), is_date=True) if is_valid else None


def _valid_time(hour: int, minute: int, second: int, half: str | None) -> Moment | None:
    is_valid_hour = 1 <= hour <= _NOON if half else hour < _HOURS_OF_DAY
    if not is_valid_hour or minute >= 60 or second >= 60:
        return None
    return Moment((hour, minute, second), (half or "").lower())


def _in_24_hours(moment: Moment) -> set[tuple[int, int, int]]:
    """Returns the times on a clock of 24 hours that a time may mean: both halves of the day if it names none."""
    if moment.is_date:
        return {moment.numbers}
    hour, minute, second = moment.numbers
    if moment.half:
        first_hour = _NOON if moment.half == "p" else 0
        return {(first_hour + hour % _NOON, minute, second)}
    hours = {hour}
    if hour <= _NOON:
        hours.add((hour + _NOON) % _HOURS_OF_DAY)
    return {(possible_hour, minute, second) for possible_hour in hours}
