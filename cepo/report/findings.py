"""Presents a diagnosis on a page and in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cepo.report.diagnosis import NOTHING_FOUND, Finding, Observed, diagnosed
from cepo.report.html_page import Section
from cepo.report.recorded_run import RunData
from cepo.report.responses import RecordedResponse, shortened
from cepo.report.shown_responses import ColouredRow, ColouredToken, CreditedResponse, verdict, visible

FAULTS = "What keeps it from learning"
_LONGEST = 2_000
"""Characters of a response that is evidence."""


def findings_section(findings: Sequence[Finding]) -> Section:
    """Returns the part of a page with the faults and their evidence, or with the sentence that none was found."""
    notes: list[str] = []
    responses: list[CreditedResponse] = []
    for finding in findings:
        notes.append(f"{finding.name.capitalize()}. {finding.figure} Try: {finding.advice}")
        responses += [as_evidence(response, finding.name.capitalize()) for response in finding.evidence]
    return Section(title=FAULTS, notes=notes or [NOTHING_FOUND], responses=responses, closed=not findings)


def as_evidence(response: RecordedResponse, title: str) -> CreditedResponse:
    """Returns a response as a page shows it, without colours."""
    text = visible(shortened(response.response, _LONGEST))
    token = ColouredToken(text=text, side="more", percent=0, help=f"{response.length:,} long")
    return CreditedResponse(
        title=f"{title}: step {response.step}, {verdict(response.right)}, reward {response.reward:.3g}",
        problem=visible(response.prompt[-_LONGEST:]),
        ground_truth=visible(response.ground_truth or "not recorded"),
        image=None,
        rows=[ColouredRow(label="response", tokens=[token])],
    )


def findings_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Yields a diagnosis for a terminal."""
    if not findings:
        yield NOTHING_FOUND
    for finding in findings:
        yield finding.line()


def diagnosed_run(run: RunData) -> list[Finding]:
    """Returns the faults of a run of cepo, by its metrics and its recorded rollouts."""
    from cepo.report.run_responses import groups_of_run

    return diagnosed(Observed(groups_of_run(run.folder), run.curves))
