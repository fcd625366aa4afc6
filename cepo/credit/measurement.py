"""Measures credit: samples rollouts, continues their prefixes, and compares each method's credit with the truth."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from cepo.algorithms import Estimator
from cepo.credit import agreement
from cepo.credit.session import Session
from cepo.credit.signals import Arm, MethodSignal, credit_arms, signals_of, value_arms
from cepo.credit.stored import Continuations, claim_folder, kept_rollouts
from cepo.credit.truth import Truth, assemble, chosen_tokens, needed_prefixes
from cepo.models.processing import Processing
from cepo.tracking.run_folder import encode_line, finite_or_none, png_bytes, write_atomically
from cepo.trainer.asking import Rollouts
from cepo.trees import Tree


def measured(
    folder: Path,
    session: Session,
    methods: Mapping[str, Estimator],
    *,
    checkpoint: str | None,
    responses: int,
    tokens: int,
    continuations: int,
    dry_run: bool,
) -> tuple[str, Tree]:
    """Measures at most so many `responses` and `tokens` of each, resumed from the samples in `folder`.

    `continuations` is M, the number per prefix; with 0 only the teachers' knowledge is measured. Returns a line on the
    work and the results, which are also written; a dry run samples no continuations and has none.
    """
    effort = {"num_responses": responses, "num_tokens": tokens, "num_continuations": continuations}
    claim_folder(folder, {"measures": "credit", "checkpoint": checkpoint, **effort}, session.config)
    seed = session.config.worker.rollout.seed
    rollouts = kept_rollouts(folder, session)
    chosen = chosen_tokens(rollouts, num_responses=responses, num_tokens=tokens, seed=seed)
    prefixes = needed_prefixes(rollouts, chosen) if continuations else []
    continued = Continuations(folder, session, rollouts, number=continuations)
    number, left = len(prefixes), len(continued.missing(prefixes))
    work = (
        f"{len(chosen)} responses, {sum(map(len, chosen.values())):,} tokens; {number * continuations:,} continuations "
        f"({number:,} prefixes, {continuations} each), {left * continuations:,} of them are left"
    )
    if dry_run:
        return work, {}
    continued.sample(prefixes)
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
        results |= compared(truth, rollouts, signals, seed=seed)
        _write_traces(folder, rollouts, truth, signals, session.processing)
    write_atomically(folder / "credit.json", json.dumps(results, indent=1) + "\n")
    return work, results


def compared(truth: Truth, rollouts: Rollouts, signals: Sequence[MethodSignal], *, seed: int) -> Tree:
    """Returns the figures of all credits and values, by name, and the calibration curves of the values.

    `oracle` compares the truth from one half of the continuations with that from the other half. This is what perfect
    credit with half as many continuations would reach.
    """
    half = dataclasses.replace(truth, credit=truth.credit_halves[1], value=truth.value_halves[1])
    credits = [(arm, truth) for arm in credit_arms(truth, rollouts, signals, seed=seed)]
    values = [(arm, truth) for arm in value_arms(truth, rollouts, signals)]
    credits.append((Arm("oracle", "baseline", truth.credit_halves[0]), half))
    values.append((Arm("oracle", "baseline", truth.value_halves[0]), half))
    return {
        "credit": [
            {"name": arm.name, "kind": arm.kind, **agreement.credit_figures(of, arm.numbers, seed=seed)}
            for arm, of in credits
        ],
        "value": [
            {"name": arm.name, "kind": arm.kind, **agreement.value_figures(of, arm.numbers, seed=seed)}
            | ({"calibration": agreement.calibration(arm.numbers, truth.value)} if of is truth else {})
            for arm, of in values
        ],
    }


def _write_traces(
    folder: Path, rollouts: Rollouts, truth: Truth, signals: Sequence[MethodSignal], processing: Processing
) -> None:
    """Writes `traces.jsonl`, one object per measured response (`docs/credit.md`), and the images of their problems."""
    (folder / "images").mkdir(exist_ok=True)
    lines: list[Tree] = []
    for row, measured_tokens in truth.entries.items():
        number, tokens = row // rollouts.group_size, rollouts.generations[row].response_ids
        problem, image = rollouts.problems[number], f"images/{number}.png"
        if problem.images:
            (folder / image).write_bytes(png_bytes(problem.images[0]))
        values: list[float | None] = [None] * (len(tokens) + 1)
        credit: list[float | None] = [None] * len(tokens)
        for index in measured_tokens:
            token, before, own = int(truth.token[index]), float(truth.value[index]), float(truth.credit[index])
            credit[token], values[token], values[token + 1] = own, before, before + own
        lines.append(
            {
                "prompt_id": problem.prompt_id,
                "ground_truth": problem.ground_truth,
                "problem": problem.text,
                "image": image if problem.images else None,
                "row": row,
                "response": rollouts.responses[row],
                "reward": float(rollouts.rewards[row]),
                "correct": bool(rollouts.correct[row]),
                "tokens": processing.token_texts(tokens),
                "token_ids": list(tokens),
                "values": values,
                "credit": credit,
                "advantages": {each.label: _of(each.signal.advantages, row, len(tokens)) for each in signals},
                "evidence": {
                    each.label: {name: _of(found, row, len(tokens)) for name, found in each.signal.diagnostics.items()}
                    for each in signals
                    if each.signal.diagnostics
                },
            }
        )
    write_atomically(folder / "traces.jsonl", b"".join(map(encode_line, lines)).decode("utf-8"))


def _of(tensor: Tensor, row: int, length: int) -> list[float | None]:
    return [finite_or_none(float(value)) for value in tensor[row, :length]]
