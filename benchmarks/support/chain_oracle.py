"""The oracle as a plugin (`trainer.plugins=[benchmarks/support/chain_oracle.py]`): the true credit of the chain world's steps.

The worked solution of the data set says after which step a walk is still right. What such a state is worth is counted:
rollouts are Monte-Carlo continuations of the states that they pass, so the chances that a step goes right, that a wrong
one is taken back, that a row and the box repeat what was found, are means over the rollouts of earlier steps.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from cepo.algorithms import GroupRelativeEstimator, credit, register_estimator
from cepo.metrics import mean_of
from cepo.microgeo.kinds import CHAIN
from cepo.types import Reference, RolloutGroup, TokenBatch, TokenSignal

_STEP = re.compile(
    r"(?P<again>No, )?(?:[A-Z]\w+ )?(?P<label>[a-d]\d) (?P<name>(?:hollow )?\w+) [^.]*?(?P<place>\d+)\."
    r"|Row (?P<row>[a-d]) (?P<end>\d+)\."
    r"|\\boxed\{\((?P<box>[\d,]*)\)\}"
)
_PRIOR = 0.8, 2.0  # the chance that a step of any kind goes right, and how many sightings it counts as


@dataclass(frozen=True)
class Step:
    """A part of a response: characters up to `end`, and the key under which its chance is counted.

    `key`: a figure's name, `row`, `box`, or `again` for a step that takes the last one back.
    """

    end: int
    key: str
    label: str
    result: str


def steps_of(text: str) -> list[Step]:
    """The steps, row ends and box of a response, in their order."""
    found = []
    for match in _STEP.finditer(text):
        if match["label"]:
            key = "again" if match["again"] else match["name"]
            found.append(Step(match.end(), key, match["label"], match["place"]))
        elif match["row"]:
            found.append(Step(match.end(), "row", match["row"], match["end"]))
        else:
            found.append(Step(match.end(), "box", "", match["box"]))
    return found


class Chances:
    """Decayed counts of how often a step of each kind went right from a right state."""

    def __init__(self) -> None:
        self.right: defaultdict[str, float] = defaultdict(float)
        self.seen: defaultdict[str, float] = defaultdict(float)

    def __getitem__(self, key: str) -> float:
        mean, weight = _PRIOR
        return (self.right[key] + mean * weight) / (self.seen[key] + weight)

    def add(self, outcomes: Sequence[tuple[str, bool]], *, decay: float = 0.9) -> None:
        """Adds what was seen, after the counts so far have lost 1 - `decay` of their weight: the policy changes."""
        for counts in (self.right, self.seen):
            for key in counts:
                counts[key] *= decay
        for key, is_right in outcomes:
            self.right[key] += is_right
            self.seen[key] += 1


def values_along(
    steps: Sequence[Step], truth: Sequence[Step], chances: Mapping[str, float] | Chances
) -> tuple[list[float], list[tuple[str, bool]]]:
    """`V` before the first step and after each one, and what was seen of each kind of step while the walk was right.

    `V_k = c_k V_{k+1} + (1 - c_k) W_{k+1}` with c_k the chance of step k of the solution and `W = again V + (1 - again) D`
    the value just after a wrong step, which may be taken back at once; D is what a diamond later in the row is worth.
    After a wrong row end V = 0.
    """
    after = [1.0] * (len(truth) + 1)  # after[k]: k steps of the solution are right
    repaired = [0.0] * (len(truth) + 1)  # repaired[k]: k steps are done and the place is wrong, too late for `again`
    for k in reversed(range(len(truth))):
        chance, key = chances[truth[k].key], truth[k].key
        repaired[k] = chance * after[k + 1] if key == "diamond" else 0.0 if key in ("row", "box") else repaired[k + 1]
        mended = 0.0 if key in ("row", "box") else chances["again"] * after[k + 1]
        wrong = mended + (1 - chances["again"]) * repaired[k + 1] if mended else 0.0
        after[k] = chance * after[k + 1] + (1 - chance) * wrong
    values, seen, k, state = [after[0]], list[tuple[str, bool]](), 0, "right"
    for step in steps:
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
    return values, seen


@lru_cache
def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(CHAIN.assets)


def token_advantages(
    steps: Sequence[Step], values: Sequence[float], pieces: Sequence[str], reward: float
) -> list[float]:
    """Each token's `V(end of its step) - V(start of its step)`; tokens behind the last step, and the end token, get R - V."""
    found, position, k = list[float](), 0, 0
    for piece in pieces:
        position += len(piece)
        if k < len(steps):
            found.append(values[k + 1] - values[k])
            k += position >= steps[k].end
        else:
            found.append(reward - values[-1])
    return [*found, reward - values[-1]]


@register_estimator("chain_oracle")
class ChainOracle(GroupRelativeEstimator):
    """`A_t = (V(end of t's step) - V(start of t's step)) / (std_g + 1e-6)`: the group advantage's scale, on the same groups.

    It keeps the counts between steps, which a method must not: it is a yardstick, not a method.
    """

    views = ("oracle",)
    reads_old_log_probs = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._chances = Chances()
        self._rows: list[tuple[list[Step], list[Step], list[str]]] = []

    def references(self, group: RolloutGroup) -> dict[str, list[Reference | None]]:
        """No teacher reads anything: this is where a method sees the texts."""
        assert group.solution is not None, "the chain world's data set has solutions"
        truth = steps_of(group.solution)
        for rollout in group.rollouts:
            pieces = [_tokenizer().decode([token]) for token in rollout.response_ids]
            self._rows.append((steps_of("".join(pieces)), truth, pieces))
        return {"oracle": [None] * len(group.rollouts)}

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        rows, self._rows = self._rows, []
        assert len(rows) == len(batch.rewards)
        if not self._chances.seen:
            self._chances.add(
                [pair for steps, truth, _ in rows for pair in values_along(steps, truth, self._chances)[1]]
            )
        _, deviation, _ = credit.group_moments(batch.rewards, batch.group_ids)
        live = credit.live_rows(batch.rewards, batch.group_ids)
        advantages = torch.zeros_like(batch.token_level_rewards, dtype=torch.float64)
        outcomes, error = list[tuple[str, bool]](), torch.zeros(len(rows))
        for row, (steps, truth, pieces) in enumerate(rows):
            values, seen = values_along(steps, truth, self._chances)
            outcomes += seen
            reward = float(batch.rewards[row])
            error[row] = abs(reward - values[-1])
            length = int(batch.response_mask[row].sum())
            credits = token_advantages(steps, values, pieces, reward)[:length]
            advantages[row, :length] = torch.tensor(credits).to(advantages)
        self._chances.add(outcomes)
        scaled = (advantages / (deviation + credit.DEVIATION_FLOOR).unsqueeze(1)) * live.unsqueeze(1)
        metrics = credit.group_metrics(batch.rewards, batch.correct, batch.group_ids)
        metrics["oracle/last_value_error"] = mean_of(error)
        return TokenSignal(advantages=scaled.to(batch.token_level_rewards.dtype) * batch.response_mask, metrics=metrics)
