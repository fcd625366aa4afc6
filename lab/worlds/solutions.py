"""Solves the shapes world's problems in steps, correctly or with the typical mistakes that demonstrations make."""

from __future__ import annotations

from collections.abc import Callable

from cepo.microgeo.world import Numbers, Problem

Slip = Callable[[int], int]
"""Is applied to every computed result."""
Steps = list[tuple[str, int]]
"""The text up to a result, and the result. The last one is the answer."""


def no_slip(result: int) -> int:
    return result


def solve(problem: Problem, *, seen: str | None = None, misconceived: bool = False, slip: Slip = no_slip) -> Steps:
    """Returns the steps for a reader who sees `seen`, by default what the image shows.

    `misconceived` makes the family's typical systematic mistake.
    """
    return _SOLVE[problem.family](problem.seen if seen is None else seen, problem.numbers, misconceived, slip)


def _perimeter(seen: str, numbers: Numbers, misconceived: bool, slip: Slip) -> Steps:
    count, side = int(seen), numbers[0]
    if misconceived:
        return [(f"{count} sides. {count}+{side}=", slip(count + side))]
    return [(f"{count} sides. {count}*{side}=", slip(count * side))]


def _angle(seen: str, numbers: Numbers, misconceived: bool, slip: Slip) -> Steps:
    count, (first, second) = int(seen), numbers
    total = 180 * (count - 1 if misconceived else count - 2)
    known = slip(first + second)
    rest = slip(total - known)
    steps = [(f"{count} corners. {first}+{second}=", known), (f"{total}-{known}=", rest)]
    if count > 3:
        steps.append((f"{rest}/{count - 2}=", slip(rest // (count - 2))))
    return steps


def _ticks(seen: str, numbers: Numbers, misconceived: bool, slip: Slip) -> Steps:
    count, part = int(seen), numbers[0]
    factor = count + 1 if misconceived else count
    return [(f"{count} parts. {factor}*{part}=", slip(factor * part))]


def _fence(seen: str, numbers: Numbers, misconceived: bool, slip: Slip) -> Steps:
    width, height = numbers
    single, double = (width, height) if seen == "width" else (height, width)
    if misconceived:
        return [(f"{seen} open. {single}+{double}=", slip(single + double))]
    doubled = slip(2 * double)
    return [(f"{seen} open. 2*{double}=", doubled), (f"{doubled}+{single}=", slip(doubled + single))]


_SOLVE = {"perimeter": _perimeter, "angle": _angle, "ticks": _ticks, "fence": _fence}
