"""Measures the credit of methods and presents the results: tables for the terminal and Markdown, and a page with bars."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from cepo.algorithms import Estimator
from cepo.credit import agreement
from cepo.credit.agreement import QUARTERS, Arm, MethodSignal, credit_arms, signals_of, value_arms
from cepo.credit.session import Session
from cepo.credit.truth import (
    Continuations,
    Truth,
    assemble,
    chosen_tokens,
    claim_folder,
    kept_rollouts,
    needed_prefixes,
)
from cepo.files.trees import Fields, Tree
from cepo.models.processing import Processing
from cepo.report.drawing import Chart, Section, Series, scores, write_page
from cepo.report.score_tables import Cell, Column, ScoreTable, TableRow
from cepo.run_folder.pictures import png_bytes
from cepo.run_folder.writing import encode_line, finite_or_none, write_atomically
from cepo.trainer.rollouts import Rollouts

PAGE_FILE = "credit.html"
_ORACLE = "oracle"
_CREDIT = {
    "pearson": "Pearson",
    "pearson_corrected": "Pearson corrected",
    "spearman": "Spearman",
    "spearman_corrected": "Spearman corrected",
    "auroc": "AUROC",
    "top_hit": "top-1 hit",
    "share_on_decisive": "share on decisive",
    "sign_agreement": "sign agreement",
}
_VALUE = {"pearson": "Pearson", "pearson_corrected": "Pearson corrected", "calibration_error": "calibration error"}
_KNOWLEDGE = {
    "nats": "nats",
    **{quarter: f"{quarter} quarter" for quarter in QUARTERS},
    "limit": "limit, -log p",
    "wrong": "nats of wrong responses",
}
_PARTS = {
    "knowledge": ("What teachers know of right and wrong responses, in nats per response", _KNOWLEDGE),
    "credit": ("Credit of a token, against A*", _CREDIT),
    "value": ("Value of a prefix, against V", _VALUE),
}


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
    credits.append((Arm(_ORACLE, "baseline", truth.credit_halves[0]), half))
    values.append((Arm(_ORACLE, "baseline", truth.value_halves[0]), half))
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


def credit_tables(results: Fields, *, with_kinds: bool = False) -> list[ScoreTable]:
    """Returns the tables with 95 % intervals; an undefined figure has no cell. With kinds, a row's name ends with its kind."""
    return [
        ScoreTable(
            title=f"{title}, ± standard error over problems",
            columns=[Column(name=column, digits=3) for column in columns.values()],
            rows=[
                TableRow(
                    name=f"{row['name']} ({row['kind']})" if with_kinds and "kind" in row else row["name"],
                    cells={
                        column: Cell(mean=found["value"], **{name: found[name] for name in ("error", "low", "high")})
                        for name, column in columns.items()
                        if (found := row[name])["value"] is not None
                    },
                )
                for row in results[part]
            ],
            notes=_notes(results["counts"]) if part == "credit" else (),
        )
        for part, (title, columns) in _PARTS.items()
        if part in results
    ]


def write_credit_page(results: Fields, out: Path) -> Path:
    """Writes the page of a measurement: its tables as bars with 95 % intervals, and the values' calibration curves."""
    description, sections = results["description"], list[Section]()
    tables = [scores(table, first="method", limit=_ORACLE) for table in credit_tables(results, with_kinds=True)]
    if results["knowledge"]:
        sections.append(Section(title="Knowledge", closed=False, notes=[_KNOWING], tables=tables[:1]))
    if "credit" in results:
        notes = [*_notes(results["counts"]), _LEGEND]
        sections += [
            Section(title="Credit", closed=False, notes=notes, tables=tables[1:2]),
            Section(title="Value", closed=False, tables=tables[2:], charts=[_calibration(results)]),
        ]
    model = "/".join(Path(str(description["checkpoint"] or description["model"])).parts[-2:])
    return write_page(
        out,
        title="Credit of methods" if "credit" in results else "What teachers know",
        subtitle=f"{model} · {description['generator']}",
        sections=sections,
    )


def _calibration(results: Fields) -> Chart:
    curves = [
        Series(label=row["name"], steps=[one["believed"] for one in points], values=[one["true"] for one in points])
        for row in results["value"]
        if (points := row.get("calibration"))
    ]
    perfect = Series(label="calibrated", steps=[0.0, 1.0], values=[0.0, 1.0], help="belief and truth are equal")
    return Chart(title="Calibration", unit="V", series=[*curves, perfect], x="believed chance of a right end")


_KNOWING = (
    "The mean log-probability ratio of teacher to student on right responses: how far the reference announces them. "
    "No teacher exceeds the limit on average. If it only helps in the last quarter, the teacher knows the answer but not "
    "the derivation. On wrong responses the mean is the lower, the better the reference tells them from right ones."
)
_LEGEND = (
    "The thin line of a bar is its 95 % interval. The mark across a column is the row 'oracle': what the truth from one "
    "half of the continuations reaches against that from the other, as far as any credit can be seen to agree with it."
)


def _notes(counts: Fields) -> list[str]:
    share = counts["decisive_tokens"] / counts["tokens"]
    return [
        f"{counts['responses']} responses to {counts['problems']} problems, {counts['tokens']:,} tokens, of which "
        f"{share:.1%} are decisive (|A*| > 0.25).",
        f"{counts['continuations']:,} continuations of {counts['prefixes']:,} prefixes with {counts['tokens_sampled']:,} "
        f"sampled tokens; {counts['share_right']:.3f} of all responses are right.",
    ]
