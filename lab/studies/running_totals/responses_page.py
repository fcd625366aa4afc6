"""Draws responses with their contrast, the oracle's gate and the advantages of methods as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from cepo.credit.agreement import MethodSignal
from cepo.report.html_page import Section, write_page
from cepo.report.shown_responses import ColouredRow, ColouredToken, CreditedResponse, coloured
from lab.studies.running_totals.gates import Sample, totals_of_row
from lab.studies.running_totals.grading import decisive_places, tokens_at

NUMBER = 10
_FULL_CONTRAST = 3.0
"""Contrast in nats that has full colour."""


def write_responses(sample: Sample, file: Path, *, title: str) -> None:
    """Writes the page of `NUMBER` responses, right and wrong ones in turn, each pair of another problem."""
    responses = [_drawn(sample, row) for row in _chosen_rows(sample)]
    notes = [
        "Blue is for the response, orange against it. Contrast has full colour at 3 nats; the oracle marks the tokens that "
        "decided the outcome; advantages have full colour where a method keeps all of the rollout's."
    ]
    write_page(
        file,
        title=title,
        subtitle=f"{len(responses)} responses to {len(responses) // 2} problems before training",
        headline="The contrast of two teachers is near 0 on free words, and large where a total is decided.",
        sections=[Section(title="Responses", notes=notes, responses=responses, closed=False)],
    )


def _chosen_rows(sample: Sample) -> list[int]:
    """Returns the first right and the first wrong response of the first problems that have both."""
    chosen: list[int] = []
    for number in range(len(sample.rollouts.problems)):
        rows = sample.rollouts.rows_of(number)
        right = [row for row in rows if sample.rollouts.correct[row]]
        wrong = [row for row in rows if not sample.rollouts.correct[row]]
        if right and wrong:
            chosen += [right[0], wrong[-1]]
        if len(chosen) == NUMBER:
            break
    return chosen


def _drawn(sample: Sample, row: int) -> CreditedResponse:
    problem = sample.rollouts.problems[row // sample.rollouts.group_size]
    verdict = "Right" if sample.rollouts.correct[row] else "Wrong"
    return CreditedResponse(
        title=f"{verdict} response",
        problem=problem.text,
        ground_truth=problem.ground_truth,
        image=None,
        rows=list(_rows(sample, row)),
    )


def _rows(sample: Sample, row: int) -> Iterator[ColouredRow]:
    pieces = [piece or "⏎" for piece in sample.pieces[row]]
    length = len(pieces)
    gate = sample.methods[0]
    contrast = gate.signal.diagnostics["delta"][row, :length].tolist()
    yield ColouredRow(label="contrast", tokens=_coloured(pieces, contrast, _FULL_CONTRAST, "nats"))
    places = decisive_places("".join(sample.pieces[row]), totals_of_row(sample, row))
    sign = 1.0 if sample.rollouts.correct[row] else -1.0
    decisive = [sign * marked for marked in tokens_at(places, sample.pieces[row])]
    yield ColouredRow(label="oracle", tokens=_coloured(pieces, decisive, 1.0, "decisive"))
    for method in sample.methods:
        advantages = method.signal.advantages[row, :length].tolist()
        full = _largest(method, row) or 1.0
        yield ColouredRow(label=method.label.partition("(")[0], tokens=_coloured(pieces, advantages, full, "advantage"))


def _largest(method: MethodSignal, row: int) -> float:
    return float(method.signal.advantages[row].abs().max())


def _coloured(pieces: Sequence[str], values: Sequence[float], full: float, name: str) -> list[ColouredToken]:
    tokens: list[ColouredToken] = []
    for piece, value in zip(pieces, values, strict=True):
        tokens.append(coloured(piece, value / full, f"{name} {value:+.3f}"))
    return tokens
