"""Reads dates and times of day, whose signs are no arithmetic: `2024-01-02` is not 2021, and `3:05` is no ratio."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cepo.rewards.tokens import plain_characters

_DATE = re.compile(r"(\d{4})([-/.])(\d{2})\2(\d{2})")
_TIME = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?\s*(?:([ap])\.?\s?m\.?)?", re.IGNORECASE)
_FULL_HOUR = re.compile(r"(\d{1,2})()()\s*([ap])\.?\s?m\.?", re.IGNORECASE)
_MARKUP = re.compile(r"\\(?:text|textrm|mathrm|textbf|mathbf)(?![A-Za-z])|\\[,;: ]|[${}~]")
_NOON = 12


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
    parts = _plain(text).split(":")
    is_padded = any(len(part) > 1 and part.startswith("0") for part in parts[:2])
    return moment if is_padded else None


def same_moment(prediction: str, gold: str) -> bool:
    """Returns whether a prediction states the date or the time of a gold answer; it may lack `am` or `pm`."""
    first = _date_or_time(prediction)
    second = _date_or_time(gold)
    if first is None or second is None or first.is_date != second.is_date:
        return False
    if first == second:
        return True
    if (first.half and second.half) or first.half == second.half:
        return False
    return bool(_in_24_hours(first) & _in_24_hours(second))


def _plain(text: str) -> str:
    return _MARKUP.sub(" ", plain_characters(text)).strip().removesuffix(",").strip()


def _date_or_time(text: str) -> Moment | None:
    plain = _plain(text)
    date = _DATE.fullmatch(plain.removesuffix("."))
    if date is not None:
        year, month, day = int(date[1]), int(date[3]), int(date[4])
        return Moment((year, month, day), is_date=True) if 1 <= month <= 12 and 1 <= day <= 31 else None
    time = _TIME.fullmatch(plain) or _TIME.fullmatch(plain.removesuffix(".")) or _FULL_HOUR.fullmatch(plain)
    if time is None:
        return None
    hour, minute, second = int(time[1]), int(time[2] or 0), int(time[3] or 0)
    half = (time[4] or "").lower()
    is_on_a_clock = minute < 60 and second < 60 and (1 <= hour <= _NOON if half else hour < 24)
    return Moment((hour, minute, second), half) if is_on_a_clock else None


def _in_24_hours(moment: Moment) -> set[tuple[int, int, int]]:
    """Returns the times on a clock of 24 hours that a time may mean: both halves of the day if it names none."""
    if moment.is_date:
        return {moment.numbers}
    hour, minute, second = moment.numbers
    if moment.half:
        return {(hour % _NOON + (_NOON if moment.half == "p" else 0), minute, second)}
    return (
        {(hour, minute, second), ((hour + _NOON) % 24, minute, second)} if hour <= _NOON else {(hour, minute, second)}
    )
