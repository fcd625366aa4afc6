"""Estimates the values of states of a walk in the chain world, and the true credit of its steps.

The worked solution of the data set shows after which steps a walk is still correct. The values are estimated by
counting: rollouts are Monte-Carlo continuations of the states that they pass. The probabilities that a step is correct,
that a wrong one is corrected, and that a row's end and the box repeat the results are means over earlier rollouts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_STEP = re.compile(
    r"(?P<again>No, )?(?:[A-Z]\w+ )?(?P<label>[A-L]) (?P<name>(?:hollow )?\w+) [^.]*?(?P<place>\d+)\."
    r"|Row (?P<row>\d) (?P<end>\d+)\."
    r"|\\boxed\{\((?P<box>[\d,]*)\)\}"
)
_PRIOR = 0.8, 2.0  # the prior probability that a step is correct, and its weight in observations


@dataclass(frozen=True)
class Step:
    """A part of a response: characters up to `end`, and the key under which its outcomes are counted.

    `named` is where the figure's name begins, and `decides` where the first word begins that decides whether the right
    step of that figure is made; both are the first character of other parts. `key` is a figure's name, `row`, `box`, or
    `again` for a step that corrects the last one.
    """

    named: int
    decides: int
    end: int
    key: str
    label: str
    result: str


def steps_of(text: str) -> list[Step]:
    """Returns the steps, row ends and box of a response, in order."""
    found = []
    for match in _STEP.finditer(text):
        named = decides = match.start()
        if match["again"]:
            key, label, result = "again", match["label"], match["place"]
        elif match["label"]:
            key, label, result = match["name"], match["label"], match["place"]
            named, decides = match.start("name"), match.start("place") if key == "diamond" else match.end("name")
        elif match["row"]:
            key, label, result = "row", match["row"], match["end"]
        else:
            key, label, result = "box", "", match["box"]
        found.append(Step(named, decides, match.end(), key, label, result))
    return found


@dataclass(frozen=True)
class Walk:
    """A response's values before its first step and after each, and the outcomes of its steps while it was correct.

    `starts` has the character from which each step's tokens have credit: where its outcome begins to be decided, or the
    name of a misread figure; after a wrong step its first character, since a correction might have begun there.
    """

    values: list[float]
    starts: list[int]
    outcomes: list[tuple[str, bool]]


class Chances:
    """The probabilities that a step of each kind from a correct state is correct, from decayed counts."""

    def __init__(self) -> None:
        self.right: defaultdict[str, float] = defaultdict(float)
        self.seen: defaultdict[str, float] = defaultdict(float)

    def __getitem__(self, key: str) -> float:
        mean, weight = _PRIOR
        return (self.right[key] + mean * weight) / (self.seen[key] + weight)

    def add(self, outcomes: Sequence[tuple[str, bool]], *, decay: float = 0.9) -> None:
        """Multiplies the counts by `decay`, since the policy changes, and adds new outcomes."""
        for counts in (self.right, self.seen):
            for key in counts:
                counts[key] *= decay
        for key, is_right in outcomes:
            self.right[key] += is_right
            self.seen[key] += 1


def values_along(steps: Sequence[Step], truth: Sequence[Step], chances: Mapping[str, float] | Chances) -> Walk:
    """Follows a response's steps beside the solution's.

    `V_k = c_k V_{k+1} + (1 - c_k) W_{k+1}`, with c_k the probability that step k of the solution is correct.
    `W = again V + (1 - again) D` is the value just after a wrong step, which may be corrected at once; D is the value
    due to a diamond later in the row. After a wrong row end V = 0.
    """
    after = [1.0] * (len(truth) + 1)  # after[k]: k steps of the solution are right
    repaired = [0.0] * (len(truth) + 1)  # repaired[k]: k steps are done and the position is wrong, too late for `again`
    for k in reversed(range(len(truth))):
        chance, key = chances[truth[k].key], truth[k].key
        repaired[k] = chance * after[k + 1] if key == "diamond" else 0.0 if key in ("row", "box") else repaired[k + 1]
        mended = 0.0 if key in ("row", "box") else chances["again"] * after[k + 1]
        wrong = mended + (1 - chances["again"]) * repaired[k + 1] if mended else 0.0
        after[k] = chance * after[k + 1] + (1 - chance) * wrong
    values, starts, seen, k, state = [after[0]], list[int](), list[tuple[str, bool]](), 0, "right"
    for step in steps:
        is_misread = k < len(truth) and step.key not in (truth[k].key, "again")
        starts.append(0 if state == "wrong" else step.named if is_misread else step.decides)
        repeats = step.key == "again" and k > 0 and step.label == truth[k - 1].label
        if state != "lost" and not repeats and (k == len(truth) or step.label != truth[k].label):
            state = "lost"
        if state != "lost":
            if state == "wrong":
                seen.append(("again", repeats))
            k += not repeats
            is_right = step.result == truth[k - 1].result
            if state == "right" and not repeats:
                seen.append((truth[k - 1].key, is_right))
            is_final = truth[k - 1].key in ("row", "box")
            state = "right" if is_right else "lost" if is_final else "wrong" if state == "right" else "carried"
        again = chances["again"]
        worth = {
            "right": after[k],
            "wrong": again * after[k] + (1 - again) * repaired[k],
            "carried": repaired[k],
            "lost": 0,
        }
        values.append(worth[state])
    return Walk(values, starts, seen)


def token_advantages(steps: Sequence[Step], walk: Walk, pieces: Sequence[str], reward: float) -> list[float]:
    """Returns each token's `V(end of its step) - V(start of its step)`; tokens after the last step get R - V.

    Words without meaning, labels and right names come before what decides the step and get 0.
    """
    found, position, k, values = list[float](), 0, 0, walk.values
    for piece in pieces:
        position += len(piece)
        if k < len(steps):
            found.append(values[k + 1] - values[k] if position > walk.starts[k] else 0.0)
            k += position >= steps[k].end
        else:
            found.append(reward - values[-1])
    return [*found, reward - values[-1]]
