"""Groups for the choice of references, and which rows need a pass of the student or of a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cepo.algorithms import Estimator
from cepo.algorithms.references import wrong_reference, wrong_rollouts
from cepo.algorithms.settings import NegativeConfig
from cepo.data.contexts import ContextBuilder
from cepo.data.hints import sanitise_reference
from cepo.metrics import Metrics, fraction, sum_value
from cepo.models.inputs import EncodedPrompt
from cepo.rewards.answers import extract_answer
from cepo.rewards.pool import RewardPool
from cepo.trainer.rollouts import RolloutBatch, View
from cepo.types import Reference, Rollout, RolloutGroup


def rollout_groups(
    batch: RolloutBatch, pool: RewardPool, *, special_texts: Sequence[str], eos_token_ids: Sequence[int], seed: int
) -> list[RolloutGroup]:
    """The batch's groups with extracted answers; wrong ones are compared with the ground truth by the grader.

    A rounding of the ground truth, which the reward refuses, is none that a teacher should be told is wrong.

    Answers are sanitised here already, so that one of which nothing is left is no candidate for a reference.
    """
    size = batch.group_size
    extracted = [extract_answer(response) for response in batch.responses]
    answers = [sanitise_reference(answer or "", special_texts) or None for answer in extracted]
    doubtful = [row for row, answer in enumerate(answers) if answer is not None and not batch.correct[row]]
    pairs = [(str(answers[row]), batch.problems[row // size].ground_truth) for row in doubtful]
    equal = dict(zip(doubtful, pool.same_statements(pairs), strict=True)) if pairs else {}
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
    """What every view shows to whom: of the references that the method chooses, those that can be shown."""
    chosen = [estimator.references(group) for group in batch.groups]
    shown = _ReferenceContexts(batch, contexts)
    references = {name: [one for group in chosen for one in group[name]] for name in estimator.views}
    placed = {
        name: [shown.placed(row, reference) for row, reference in enumerate(of_rows)]
        for name, of_rows in references.items()
    }
    stays = estimator.settled({name: [each.text is not None for each in rows] for name, rows in placed.items()})
    views = []
    for name in estimator.views:
        texts = [each.text if stay else None for each, stay in zip(placed[name], stays[name], strict=True)]
        rows = [row for row, text in enumerate(texts) if text is not None and batch.live[row]]
        distilled = name == estimator.distilled_view
        live = [placed[name][row] for row, reference in enumerate(references[name]) if reference and batch.live[row]]
        views.append(
            View(
                name=name,
                references=texts,
                rows=rows,
                scoring_rows=[batch.scoring_row(row, placed[name][row].context, keep_state=distilled) for row in rows],
                distilled=distilled,
                num_chosen=len(live),
                num_empty=sum(each.is_empty for each in live),
                num_without_room=sum(each.is_without_room for each in live),
                num_cut=sum(placed[name][row].is_cut for row in rows),
            )
        )
    return views


def has_reference(views: Sequence[View]) -> dict[str, Tensor]:
    """view -> (B,) whether the teacher of each row reads a reference."""
    return {view.name: torch.tensor([text is not None for text in view.references]) for view in views}


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
    """Brings the views' log-probs into `batch`; every row without a pass holds the student's own.

    `references/<view>_used`: of the rows that learn. `_empty`, `_without_room`: of the references that the method had
    chosen for live rows, those of which sanitising left nothing and those for which the context had no room. `_cut`: of the
    references shown.
    """
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
        metrics[f"references/{view.name}_empty"] = fraction(view.num_empty, view.num_chosen)
        metrics[f"references/{view.name}_without_room"] = fraction(view.num_without_room, view.num_chosen)
        metrics[f"references/{view.name}_cut"] = fraction(view.num_cut, len(view.rows))
    return metrics


def fallback_metrics(groups: Sequence[RolloutGroup], negative: NegativeConfig) -> Metrics:
    """Groups without a wrong rollout, and groups with wrong ones none of which gives what `negative` takes of it."""
    wrong = [group for group in groups if wrong_rollouts(group)]
    unextractable = [group for group in wrong if wrong_reference(group, negative) is None]
    return {
        "references/groups_without_wrong": fraction(len(groups) - len(wrong), len(groups)),
        "references/groups_wrong_unextractable": fraction(len(unextractable), len(groups)),
    }


@dataclass(frozen=True, kw_only=True)
class _Placed:
    """A row's reference as its teacher reads it: `text` is None where it reads none."""

    text: str | None = None
    context: EncodedPrompt | None = None
    is_empty: bool = False
    is_without_room: bool = False
    is_cut: bool = False


class _ReferenceContexts:
    """Texts and teacher contexts, built once for all rollouts that share them; contexts for live rows alone."""

    def __init__(self, batch: RolloutBatch, contexts: ContextBuilder) -> None:
        self._batch, self._contexts = batch, contexts
        self._built: dict[tuple[int, int, bool], _Placed] = {}
        self._fitted: dict[tuple[int, str, bool], tuple[EncodedPrompt, str] | None] = {}

    def placed(self, row: int, reference: Reference | None) -> _Placed:
        if reference is None:
            return _Placed()
        prompt, is_live = row // self._batch.group_size, bool(self._batch.live[row])
        key = (prompt, id(reference), is_live)
        if key not in self._built:
            self._built[key] = self._place(prompt, reference, is_live=is_live)
        return self._built[key]

    def _place(self, prompt: int, reference: Reference, *, is_live: bool) -> _Placed:
        batch, text = self._batch, self._contexts.reference_text(reference)
        if not text:
            return _Placed(is_empty=True)
        is_cut = text != self._contexts.whole_text(reference)
        if not is_live:
            return _Placed(text=text, is_cut=is_cut)
        key = (prompt, text, reference.is_answer)
        if key not in self._fitted:  # references with the same text share one context, and so their rows' passes
            self._fitted[key] = self._contexts.fitted(
                batch.problems[prompt], batch.prompts[prompt], text, is_answer=reference.is_answer
            )
        found = self._fitted[key]
        if found is None:
            return _Placed(is_without_room=True)
        context, shown = found
        return _Placed(text=shown, context=context, is_cut=is_cut or shown != text)
