"""Measures the credit of methods against the truth, and writes the results and the measured responses."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from cepo.algorithms import Estimator
from cepo.credit import agreement
from cepo.credit.agreement import MethodSignal, credit_arms, signals_of, value_arms
from cepo.credit.resources import Session
from cepo.credit.truth import (
    Continuations,
    Truth,
    assemble,
    chosen_tokens,
    claim_folder,
    kept_rollouts,
    needed_prefixes,
)
from cepo.files.trees import Tree
from cepo.models.processing import Processing
from cepo.run_folder.pictures import png_bytes
from cepo.run_folder.writing import encode_line, finite_or_none, write_atomically
from cepo.terminal.progress import phase
from cepo.trainer.rollouts import Rollouts

logger = logging.getLogger(__name__)

TRACES_FILE = "traces.jsonl"
_ORACLE = "oracle"


def measured(
    folder: Path,
    session: Session,
    methods: Mapping[str, Estimator],
    *,
    checkpoint: str | None,
    actor: Path | None,
    responses: int,
    tokens: int,
    continuations: int,
    dry_run: bool,
) -> tuple[str, Tree]:
    """Measures at most so many `responses` and `tokens` of each, resumed from the samples in `folder`.

    `actor` is the checkpoint's folder of trained weights, None for the model's own. `continuations` is M, the number per
    prefix; with 0 only the teachers' knowledge is measured. Returns a line on the work and the results, which are also
    written; a dry run samples no continuations and has none.
    """
    effort = {"num_responses": responses, "num_tokens": tokens, "num_continuations": continuations}
    sources = {"measures": "credit", "checkpoint": checkpoint, "content_of_data": session.problems.content()}
    claim_folder(folder, sources | effort, session.config, actor=actor)
    seed = session.config.worker.rollout.seed
    rollouts = kept_rollouts(folder, session)
    chosen = chosen_tokens(rollouts, num_responses=responses, num_tokens=tokens, seed=seed)
    prefixes = needed_prefixes(rollouts, chosen) if continuations else []
    continued = Continuations(folder, session, rollouts, number=continuations)
    number = len(prefixes)
    num_missing = len(continued.missing(prefixes))
    work = (
        f"{len(chosen)} responses, {sum(map(len, chosen.values())):,} tokens; {number * continuations:,} continuations "
        f"({number:,} prefixes, {continuations} each), {num_missing * continuations:,} of them are left"
    )
    if dry_run:
        return work, {}
    logger.info("%s; --dry-run ends here, and fewer --responses, --tokens and --continuations take less time", work)
    continued.sample(prefixes)
    with phase("scoring the responses by every teacher"):
        signals = signals_of(rollouts, methods, session)
    results: Tree = {
        "description": session.description(checkpoint),
        "knowledge": agreement.knowledge(signals, rollouts, seed=seed),
    }
    if continuations:
        truth = assemble(rollouts, chosen, continued.done)
        results["counts"] = {
            "problems": len(set(truth.problem.tolist())),
            "responses": len(chosen),
            "tokens": len(truth.token),
            "decisive_tokens": int((abs(truth.credit) > agreement.DECISIVE).sum()),
            "prefixes": number,
            "continuations": number * continuations,
            "tokens_sampled": sum(continued.done[prefix.name].num_tokens for prefix in prefixes),
            "share_right": float(rollouts.correct.double().mean()),
        }
        with phase("comparing the methods' credit with the truth"):
            results |= compared(truth, rollouts, signals, seed=seed)
        _write_traces(folder, rollouts, truth, signals, session.processing)
    write_atomically(folder / "credit.json", json.dumps(results, indent=1) + "\n")
    return work, results


def compared(truth: Truth, rollouts: Rollouts, signals: Sequence[MethodSignal], *, seed: int) -> Tree:
    """Returns the figures of all credits and values, by name.

    `oracle` compares the truth from one half of the continuations with that from the other half. This is what perfect
    credit with half as many continuations would reach. `ceiling` is the correlation of perfect credit with the measured A*.
    """
    first_credit, second_credit = truth.credit_halves
    first_value, second_value = truth.value_halves
    second_half = dataclasses.replace(truth, credit=second_credit, value=second_value)

    credit_rows: list[Tree] = []
    for arm in credit_arms(truth, rollouts, signals, seed=seed):
        figures = agreement.credit_figures(truth, arm.numbers, seed=seed)
        credit_rows.append({"name": arm.name, "kind": arm.kind, **figures})
    oracle = {"name": _ORACLE, "kind": "control"}
    credit_rows.append(oracle | agreement.credit_figures(second_half, first_credit, seed=seed))
    value_rows: list[Tree] = []
    for arm in value_arms(truth, rollouts, signals):
        figures = agreement.value_figures(truth, arm.numbers, seed=seed)
        value_rows.append({"name": arm.name, "kind": arm.kind, **figures})
    value_rows.append(oracle | agreement.value_figures(second_half, first_value, seed=seed))
    results: Tree = {
        "ceiling": agreement.credit_ceiling(truth, seed=seed),
        "credit": credit_rows,
        "value": value_rows,
    }
    log_probs = agreement.at_measured_tokens(truth, rollouts.sampled_log_probs)
    for arm in agreement.delta_arms(truth, signals):
        figures = agreement.contrast_figures(truth, arm.numbers, log_probs, seed=seed)
        results.setdefault("contrast", []).append({"name": arm.name, **figures})
    return results


def _write_traces(
    folder: Path, rollouts: Rollouts, truth: Truth, signals: Sequence[MethodSignal], processing: Processing
) -> None:
    """Writes `traces.jsonl`, one object per measured response (`docs/credit.md`), and the images of their problems."""
    (folder / "images").mkdir(exist_ok=True)
    lines: list[Tree] = []
    for row, entries in truth.entries.items():
        number = row // rollouts.group_size
        problem = rollouts.problems[number]
        token_ids: list[int] = rollouts.generations[row].response_ids.tolist()
        image: str | None = None
        if problem.images:
            image = f"images/{number}.png"
            (folder / image).write_bytes(png_bytes(problem.images[0]))
        values, credit = _measured_of(truth, entries, len(token_ids))
        advantages, evidence = _signals_of_row(signals, row, len(token_ids))
        lines.append(
            {
                "prompt_id": problem.prompt_id,
                "ground_truth": problem.ground_truth,
                "problem": problem.text,
                "image": image,
                "row": row,
                "response": rollouts.responses[row],
                "reward": float(rollouts.rewards[row]),
                "correct": bool(rollouts.correct[row]),
                "tokens": processing.token_texts(token_ids),
                "token_ids": token_ids,
                "values": values,
                "credit": credit,
                "advantages": advantages,
                "evidence": evidence,
            }
        )
    write_atomically(folder / TRACES_FILE, b"".join(map(encode_line, lines)).decode("utf-8"))


def _measured_of(truth: Truth, entries: Iterable[int], length: int) -> tuple[list[float | None], list[float | None]]:
    """Returns V before each token of a response and after its last, and A* of each; None where not measured."""
    values: list[float | None] = [None] * (length + 1)
    credit: list[float | None] = [None] * length
    for entry in entries:
        token = int(truth.token[entry])
        value = float(truth.value[entry])
        credit_of_token = float(truth.credit[entry])
        credit[token] = credit_of_token
        values[token] = value
        values[token + 1] = value + credit_of_token
    return values, credit


def _signals_of_row(signals: Sequence[MethodSignal], row: int, length: int) -> tuple[Tree, Tree]:
    """Returns each method's advantages of a response's tokens, and its diagnostics if it has any."""
    advantages: Tree = {}
    evidence: Tree = {}
    for method in signals:
        advantages[method.label] = _of(method.signal.advantages, row, length)
        columns: Tree = {}
        for name, diagnostic in method.signal.diagnostics.items():
            columns[name] = _of(diagnostic, row, length)
        if columns:
            evidence[method.label] = columns
    return advantages, evidence


def _of(tensor: Tensor, row: int, length: int) -> list[float | None]:
    """Returns the entries of a (B, T) tensor for a response of this length."""
    return [finite_or_none(float(value)) for value in tensor[row, :length]]
