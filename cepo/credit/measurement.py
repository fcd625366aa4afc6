"""Measures credit: samples rollouts, continues their prefixes, and compares each method's credit with the truth."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cepo.credit import agreement
from cepo.credit.arms import Arm, credit_arms, value_arms
from cepo.credit.continuations import Continuations, expected_tokens
from cepo.credit.knowledge import knowledge
from cepo.credit.method_list import MeasuredMethod
from cepo.credit.session import Session
from cepo.credit.signals import MethodSignal, signals_of, write_traces
from cepo.credit.stored import claim_folder, kept_rollouts
from cepo.credit.truth import Prefix, Truth, assemble, chosen_tokens, needed_prefixes
from cepo.tracking.run_folder import write_atomically
from cepo.trainer.asking import Rollouts
from cepo.trees import Tree

logger = logging.getLogger(__name__)

RESULTS_FILE = "credit.json"
_PARTS_TIMED = 3


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The size of a measurement.

    Attributes:
        num_responses: maximum number of measured responses.
        num_tokens: maximum number of measured tokens per response.
        num_continuations: M, the number of continuations per prefix; with 0 only the teachers' knowledge is measured.
    """

    num_responses: int = 80
    num_tokens: int = 64
    num_continuations: int = 32


class CreditMeasurement:
    """A measurement in `folder`, resumed from the samples that the folder holds.

    Raises:
        ConfigError: the folder holds a measurement with other settings.
        DataError, EngineError, RewardError: sampling, grading or reading failed.
    """

    def __init__(
        self, folder: Path, session: Session, methods: Sequence[MeasuredMethod], effort: Effort, checkpoint: str | None
    ) -> None:
        claim_folder(
            folder, {"measures": "credit", "checkpoint": checkpoint, **dataclasses.asdict(effort)}, session.config
        )
        self._folder, self._session, self._methods = folder, session, methods
        self._checkpoint = checkpoint
        self.seed = session.config.worker.rollout.seed
        self.rollouts: Rollouts = kept_rollouts(folder, session)
        self.chosen = chosen_tokens(
            self.rollouts, num_responses=effort.num_responses, num_tokens=effort.num_tokens, seed=self.seed
        )
        self.number = effort.num_continuations
        self.prefixes: list[Prefix] = needed_prefixes(self.rollouts, self.chosen) if self.number else []
        self.continuations = Continuations(folder, session, self.rollouts, number=self.number)

    def lines(self) -> list[str]:
        """Describes the work, with an estimate of its time from continuing a few prefixes; their results are kept."""
        missing = self.continuations.missing(self.prefixes)
        count = (
            f"{len(self.prefixes) * self.number:,} continuations ({len(self.prefixes):,} prefixes, {self.number} each)"
        )
        tokens = sum(map(len, self.chosen.values()))
        lines = [f"{len(self.chosen)} responses, {tokens:,} tokens; {count}"]
        if missing:
            seconds = self.continuations.sample(missing, most_parts=_PARTS_TIMED)
            left = self.continuations.missing(missing)
            done = [prefix for prefix in missing if prefix.name in self.continuations.done]
            tokens_left, tokens_done = (
                expected_tokens(part, self.rollouts, number=self.number) for part in (left, done)
            )
            minutes = seconds * tokens_left / tokens_done / 60
            lines.append(
                f"{len(left) * self.number:,} of them are left, about {tokens_left:,} tokens and {minutes:.1f} minutes"
            )
        return lines

    def run(self) -> Tree:
        """Samples the missing continuations, then writes and returns the results."""
        logger.info("%d continuations for %d prefixes", len(self.prefixes) * self.number, len(self.prefixes))
        self.continuations.sample(self.prefixes)
        signals = signals_of(self.rollouts, self._methods, self._session)
        results: Tree = {
            "description": self._session.description(self._checkpoint),
            "knowledge": knowledge(signals, self.rollouts, seed=self.seed),
        }
        if self.number:
            truth = assemble(self.rollouts, self.chosen, self.continuations.done)
            results["counts"] = self._counts(truth)
            results |= compared(truth, self.rollouts, signals, seed=self.seed)
            write_traces(self._folder, self.rollouts, truth, signals, self._session.processing)
        write_atomically(self._folder / RESULTS_FILE, json.dumps(results, indent=1) + "\n")
        return results

    def _counts(self, truth: Truth) -> Tree:
        done = [self.continuations.done[prefix.name] for prefix in self.prefixes]
        return {
            "problems": len(set(truth.problem.tolist())),
            "responses": len(self.chosen),
            "tokens": len(truth.token),
            "decisive_tokens": int((abs(truth.credit) > agreement.DECISIVE).sum()),
            "prefixes": len(self.prefixes),
            "continuations": len(self.prefixes) * self.number,
            "tokens_sampled": sum(each.num_tokens for each in done),
            "share_right": float(self.rollouts.correct.double().mean()),
        }


def compared(truth: Truth, rollouts: Rollouts, signals: Sequence[MethodSignal], *, seed: int) -> Tree:
    """Returns the figures of all credits and values, by name, and the calibration curves of the values.

    `oracle` compares the truth from one half of the continuations with that from the other half. This is what perfect
    credit with half as many continuations would reach.
    """
    credits, values = credit_arms(truth, rollouts, signals, seed=seed), value_arms(truth, rollouts, signals)
    half = dataclasses.replace(truth, credit=truth.credit_halves[1], value=truth.value_halves[1])
    metrics = [
        *(agreement.credit_metrics(truth, arm.numbers) for arm in credits),
        agreement.credit_metrics(half, truth.credit_halves[0]),
        *(agreement.value_metrics(truth, arm.numbers) for arm in values),
        agreement.value_metrics(half, truth.value_halves[0]),
    ]
    oracle = Arm(name="oracle", kind="baseline", numbers=truth.credit)
    figures = agreement.bootstrap(truth, metrics, seed=seed)
    rows = [
        {"name": arm.name, "kind": arm.kind, **{name: dataclasses.asdict(figure) for name, figure in found.items()}}
        for arm, found in zip([*credits, oracle, *values, oracle], figures, strict=True)
    ]
    for row, arm in zip(rows[len(credits) + 1 :], values, strict=False):
        row["calibration"] = agreement.calibration(arm.numbers, truth.value)
    return {"credit": rows[: len(credits) + 1], "value": rows[len(credits) + 1 :]}
