"""Groups for the choice of references, and the consultation of teachers: one loop over a method's views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cepo.algorithms import Estimator
from cepo.data.batch import ScoringRow
from cepo.data.contexts import ContextBuilder
from cepo.metrics import Metrics, fraction, sum_value
from cepo.models.processing import EncodedPrompt
from cepo.rewards import RewardPool, extract_answer
from cepo.teacher.hints import sanitise_reference
from cepo.teacher.references import wrong_candidates, wrong_rollouts
from cepo.trainer.rollouts import RolloutBatch
from cepo.types import Reference, Rollout, RolloutGroup

if TYPE_CHECKING:
    from torch import Tensor

Scorer = Callable[[Sequence[ScoringRow], bool], "list[Tensor]"]
"""Log-probs of rows under the teacher's weights; the flag asks to keep the states for distillation."""


def rollout_groups(
    batch: RolloutBatch, pool: RewardPool, *, special_texts: Sequence[str], eos_token_ids: Sequence[int], seed: int
) -> list[RolloutGroup]:
    """The batch's groups with extracted answers; wrong ones are compared with the ground truth by the grader.

    Answers are sanitised here already, so that one of which nothing is left is no candidate for a reference.
    """
    size = batch.group_size
    extracted = [extract_answer(response) for response in batch.responses]
    answers = [sanitise_reference(answer or "", special_texts) or None for answer in extracted]
    doubtful = [row for row, answer in enumerate(answers) if answer is not None and not batch.correct[row]]
    pairs = [(str(answers[row]), batch.problems[row // size].ground_truth) for row in doubtful]
    equal = dict(zip(doubtful, pool.answers_equal(pairs), strict=True)) if pairs else {}
    groups = []
    for number, problem in enumerate(batch.problems):
        rollouts = [
            Rollout(
                index=row - number * size,
                reward=float(batch.rewards[row]),
                correct=bool(batch.correct[row]),
                response_ids=tuple(
                    token for token in batch.generations[row].response_ids if token not in eos_token_ids
                ),
                answer=answers[row],
                answer_equals_ground_truth=equal.get(row, bool(batch.correct[row])),
            )
            for row in range(number * size, (number + 1) * size)
        ]
        groups.append(
            RolloutGroup(
                prompt_id=problem.prompt_id,
                ground_truth=problem.ground_truth,
                rollouts=rollouts,
                seed=seed,
                step=batch.step,
                solution=problem.solution,
            )
        )
    return groups


def consult_teachers(
    batch: RolloutBatch, estimator: Estimator, contexts: ContextBuilder, score: Scorer
) -> tuple[Metrics, int]:
    """Fills `batch.teacher_log_probs` and `batch.references` for every view; returns metrics and tokens scored.

    Only live rows with a reference get a pass. Every other row's view is the student's own log-prob.
    """
    size, num_tokens = batch.group_size, 0
    chosen = [estimator.references(group) for group in batch.groups]
    shown = _ReferenceContexts(batch, contexts)
    metrics: Metrics = {}
    for view in estimator.views:
        references = [reference for group in chosen for reference in group[view]]
        texts = [None if reference is None else shown.text(reference) for reference in references]
        rows = [row for row, text in enumerate(texts) if text is not None and batch.live[row]]
        fitted = [shown.context(row // size, str(texts[row])) for row in rows]
        scoring_rows = [batch.scoring_row(row, context) for row, (context, _) in zip(rows, fitted, strict=True)]
        for row, (_, text) in zip(rows, fitted, strict=True):
            texts[row] = text
        log_probs = batch.old_log_probs.clone()
        distilled = view == estimator.distilled_view
        if distilled:
            batch.state_index = {row: place for place, row in enumerate(rows)}
        for row, values in zip(rows, score(scoring_rows, distilled) if rows else [], strict=True):
            log_probs[row, : len(values)] = values
        batch.teacher_log_probs[view] = log_probs
        batch.references[view] = texts
        num_tokens += sum(row.num_tokens for row in scoring_rows)
        metrics[f"references/{view}_used"] = fraction(len(rows), int(batch.live.sum()))
        metrics["work/teacher_rows"] = sum_value(len(rows)).merge(metrics.get("work/teacher_rows", sum_value(0)))
    return metrics, num_tokens


def fallback_metrics(groups: Sequence[RolloutGroup]) -> Metrics:
    """Groups that offer no wrong answer, for want of wrong rollouts or of one that can be extracted."""
    wrong = [bool(wrong_rollouts(group)) for group in groups]
    usable = [bool(wrong_candidates(group)) for group in groups]
    unextractable = sum(has_wrong and not has_usable for has_wrong, has_usable in zip(wrong, usable, strict=True))
    return {
        "references/groups_without_wrong": fraction(wrong.count(False), len(groups)),
        "references/groups_wrong_unextractable": fraction(unextractable, len(groups)),
    }


class _ReferenceContexts:
    """Texts and teacher contexts, built once for all rollouts that share them."""

    def __init__(self, batch: RolloutBatch, contexts: ContextBuilder) -> None:
        self._batch, self._contexts = batch, contexts
        self._texts: dict[int, str | None] = {}
        self._built: dict[tuple[int, str], tuple[EncodedPrompt, str]] = {}

    def text(self, reference: Reference) -> str | None:
        """What is shown, or None where sanitising leaves nothing."""
        if id(reference) not in self._texts:
            self._texts[id(reference)] = self._contexts.reference_text(reference) or None
        return self._texts[id(reference)]

    def context(self, prompt: int, text: str) -> tuple[EncodedPrompt, str]:
        """A teacher's context, and what of `text` there was room for."""
        if (prompt, text) not in self._built:
            batch = self._batch
            self._built[prompt, text] = self._contexts.fitted(batch.problems[prompt], batch.prompts[prompt], text)
        return self._built[prompt, text]
