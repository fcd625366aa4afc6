"""Measures the credit of methods and presents the results: tables for the terminal and Markdown, and a page with bars."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from cepo.algorithms import Estimator
from cepo.credit import agreement
from cepo.credit.agreement import QUARTERS, MethodSignal, credit_arms, signals_of, value_arms
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
    number = len(prefixes)
    num_missing = len(continued.missing(prefixes))
    work = (
        f"{len(chosen)} responses, {sum(map(len, chosen.values())):,} tokens; {number * continuations:,} continuations "
        f"({number:,} prefixes, {continuations} each), {num_missing * continuations:,} of them are left"
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
    credit_rows: list[Tree] = []
    for arm in credit_arms(truth, rollouts, signals, seed=seed):
        figures = agreement.credit_figures(truth, arm.numbers, seed=seed)
        credit_rows.append({"name": arm.name, "kind": arm.kind, **figures})
    oracle = agreement.credit_figures(half, truth.credit_halves[0], seed=seed)
    credit_rows.append({"name": _ORACLE, "kind": "baseline", **oracle})

    value_rows: list[Tree] = []
    for arm in value_arms(truth, rollouts, signals):
        figures = agreement.value_figures(truth, arm.numbers, seed=seed)
        curve = agreement.calibration(arm.numbers, truth.value)
        value_rows.append({"name": arm.name, "kind": arm.kind, **figures, "calibration": curve})
    oracle = agreement.value_figures(half, truth.value_halves[0], seed=seed)
    value_rows.append({"name": _ORACLE, "kind": "baseline", **oracle})
    return {"credit": credit_rows, "value": value_rows}


def _write_traces(
    folder: Path, rollouts: Rollouts, truth: Truth, signals: Sequence[MethodSignal], processing: Processing
) -> None:
    """Writes `traces.jsonl`, one object per measured response (`docs/credit.md`), and the images of their problems."""
    (folder / "images").mkdir(exist_ok=True)
    lines: list[Tree] = []
    for row, entries in truth.entries.items():
        number = row // rollouts.group_size
        problem = rollouts.problems[number]
        tokens = rollouts.generations[row].response_ids
        image: str | None = None
        if problem.images:
            image = f"images/{number}.png"
            (folder / image).write_bytes(png_bytes(problem.images[0]))
        values: list[float | None] = [None] * (len(tokens) + 1)
        credit: list[float | None] = [None] * len(tokens)
        for entry in entries:
            token = int(truth.token[entry])
            value = float(truth.value[entry])
            credit[token] = float(truth.credit[entry])
            values[token] = value
            values[token + 1] = value + float(truth.credit[entry])
        advantages: Tree = {}
        evidence: Tree = {}
        for method in signals:
            advantages[method.label] = _of(method.signal.advantages, row, len(tokens))
            columns: Tree = {}
            for name, diagnostic in method.signal.diagnostics.items():
                columns[name] = _of(diagnostic, row, len(tokens))
            if columns:
                evidence[method.label] = columns
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
                "tokens": processing.token_texts(tokens),
                "token_ids": list(tokens),
                "values": values,
                "credit": credit,
                "advantages": advantages,
                "evidence": evidence,
            }
        )
    write_atomically(folder / "traces.jsonl", b"".join(map(encode_line, lines)).decode("utf-8"))


def _of(tensor: Tensor, row: int, length: int) -> list[float | None]:
    return [finite_or_none(float(value)) for value in tensor[row, :length]]


def credit_tables(results: Fields, *, with_kinds: bool = False) -> list[ScoreTable]:
    """Returns the tables with 95 % intervals; an undefined figure has no cell. With kinds, a row's name ends with its kind."""
    tables: list[ScoreTable] = []
    for part, (title, headings) in _PARTS.items():
        if part not in results:
            continue
        rows: list[TableRow] = []
        for row in results[part]:
            name = row["name"]
            if with_kinds and "kind" in row:
                name = f"{name} ({row['kind']})"
            rows.append(TableRow(name=name, cells=_cells(row, headings)))
        tables.append(
            ScoreTable(
                title=f"{title}, ± standard error over problems",
                columns=[Column(name=heading, digits=3) for heading in headings.values()],
                rows=rows,
                notes=_notes(results["counts"]) if part == "credit" else (),
            )
        )
    return tables


def _cells(row: Fields, headings: Mapping[str, str]) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for name, heading in headings.items():
        figure = row[name]
        if figure["value"] is not None:
            cells[heading] = Cell(
                mean=figure["value"],
                error=figure["error"],
                low=figure["low"],
                high=figure["high"],
            )
    return cells


def write_credit_page(results: Fields, out: Path) -> Path:
    """Writes the page of a measurement: its tables as bars with 95 % intervals, and the values' calibration curves."""
    description = results["description"]
    sections: list[Section] = []
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
    curves: list[Series] = []
    for row in results["value"]:
        points = row.get("calibration")
        if points:
            believed = [point["believed"] for point in points]
            true = [point["true"] for point in points]
            curves.append(Series(label=row["name"], steps=believed, values=true))
    curves.append(Series(label="calibrated", steps=[0.0, 1.0], values=[0.0, 1.0], help="belief and truth are equal"))
    return Chart(title="Calibration", unit="V", series=curves, x="believed chance of a right end")


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
