"""Groups for the choice of references, and which rows need a pass of the student or of a teacher."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cepo.algorithms import Estimator
from cepo.algorithms.settings import NegativeConfig
from cepo.data.contexts import ContextBuilder
from cepo.metrics import Metrics, fraction, sum_value
from cepo.models.inputs import EncodedPrompt
from cepo.rewards import RewardPool, extract_answer
from cepo.teacher.hints import sanitise_reference
from cepo.teacher.references import wrong_reference, wrong_rollouts
from cepo.trainer.rollouts import RolloutBatch, View
from cepo.types import Reference, Rollout, RolloutGroup


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


def plan_views(batch: RolloutBatch, estimator: Estimator, contexts: ContextBuilder) -> list[View]:
    """What every view shows to whom."""
    size = batch.group_size
    chosen = [estimator.references(group) for group in batch.groups]
    shown = _ReferenceContexts(batch, contexts)
    views = []
    for name in estimator.views:
        references = [reference for group in chosen for reference in group[name]]
        texts = [None if reference is None else shown.text(reference) for reference in references]
        rows = [row for row, text in enumerate(texts) if text is not None and batch.live[row]]
        distilled = name == estimator.distilled_view
        fitted = [shown.context(row // size, str(texts[row])) for row in rows]
        scoring_rows = [
            batch.scoring_row(row, context, keep_state=distilled)
            for row, (context, _) in zip(rows, fitted, strict=True)
        ]
        for row, (_, text) in zip(rows, fitted, strict=True):
            texts[row] = text
        views.append(View(name=name, references=texts, rows=rows, scoring_rows=scoring_rows, distilled=distilled))
    return views


def student_rows(batch: RolloutBatch, estimator: Estimator, views: Sequence[View], *, every: bool) -> list[int]:
    """Live rows whose student log-probs something reads.

    Those of an on-policy optimizer step are the update's own, so that here only a signal can read them: a method's that does
    so by itself, and one that sets a teacher's view against a view that is the student's own. Where all of a row's views
    are the student's own they are equal whatever they are.
    """
    has_reference = torch.zeros(len(batch.live), dtype=torch.bool)
    lacks_reference = has_reference.clone()
    for view in views:
        shown = torch.tensor([text is not None for text in view.references])
        has_reference |= shown
        lacks_reference |= ~shown
    read = has_reference & lacks_reference
    if estimator.reads_old_log_probs:
        read |= has_reference if estimator.views else True
    needed = batch.live if every else batch.live & (read | ~batch.on_policy)
    return needed.nonzero().flatten().tolist()


def fill_views(batch: RolloutBatch, views: Sequence[View]) -> Metrics:
    """Brings the views' log-probs into `batch`; every row without a pass holds the student's own."""
    metrics: Metrics = {"work/teacher_rows": sum_value(sum(len(view.rows) for view in views))}
    for view in views:
        log_probs = batch.old_log_probs.clone()
        for row, values in zip(view.rows, view.log_probs, strict=True):
            log_probs[row, : len(values)] = values
        batch.teacher_log_probs[view.name] = log_probs
        batch.references[view.name] = view.references
        if view.distilled:
            batch.state_index = {row: view.first_place + place for place, row in enumerate(view.rows)}
        metrics[f"references/{view.name}_used"] = fraction(len(view.rows), int(batch.live.sum()))
    return metrics


def fallback_metrics(groups: Sequence[RolloutGroup], negative: NegativeConfig) -> Metrics:
    """Groups without a wrong rollout, and groups with wrong ones none of which gives what `negative` takes of it."""
    wrong = [group for group in groups if wrong_rollouts(group)]
    unextractable = [group for group in wrong if wrong_reference(group, negative) is None]
    return {
        "references/groups_without_wrong": fraction(len(groups) - len(wrong), len(groups)),
        "references/groups_wrong_unextractable": fraction(len(unextractable), len(groups)),
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
