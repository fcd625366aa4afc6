"""Writes the page of rollouts that any trainer wrote: what is wrong, a pair, curves, groups and responses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from cepo.errors import CepoError
from cepo.files.safe_files import LARGEST_IMAGE, read_bytes
from cepo.files.trees import Fields
from cepo.look.reading import SeenRollouts
from cepo.look.text_pair import clearest_pair_section
from cepo.report.charts import LENGTH, chart_sections, charts_of
from cepo.report.diagnosis import NOTHING_FOUND, Finding, Observed
from cepo.report.findings import findings_section
from cepo.report.html_page import Result, Section, Table, write_page
from cepo.report.responses import RecordedResponse, ResponseGroup, shortened
from cepo.report.shown_responses import data_uri, verdict

_MOST_CHARACTERS = 3_000_000
"""Of the responses on a page, with their prompts; of more, groups evenly spread over the run are shown."""
_MOST_ROWS = 4_000
_MOST_PICTURES = 40


def write_look_page(
    path: Path, seen: SeenRollouts, observed: Observed, findings: Sequence[Finding], *, contrast: Sequence[Section] = ()
) -> Path:
    """Writes the page and returns its path; `contrast` are parts that a model has scored."""
    pair = None if contrast else clearest_pair_section(observed.mixed)
    sections = [findings_section(findings), *contrast]
    if pair is not None:
        sections.append(pair)
    shown_groups = _spread(observed.groups)
    charts = [
        replace(chart, unit="tokens or characters") if chart.title == LENGTH else chart
        for chart in charts_of(observed.metrics)
    ]
    return write_page(
        path,
        title=seen.place.resolve().name,
        subtitle=" ".join([seen.line() + ".", *seen.notes]),
        headline=f"{findings[0].name.capitalize()}. {findings[0].figure}" if findings else NOTHING_FOUND,
        results=list(_results(observed)),
        sections=[
            *sections,
            *chart_sections(charts),
            Section(title="Responses", tables=[_responses_table(shown_groups, len(observed.responses))], closed=False),
            Section(title="Groups", tables=[_groups_table(shown_groups, len(observed.groups))]),
        ],
    )


def _spread(groups: Sequence[ResponseGroup]) -> Sequence[ResponseGroup]:
    """Returns the groups, or every second, third and so on of them, as far as a page can show their responses."""
    characters = 0
    rows = 0
    for group in groups:
        rows += len(group.responses)
        for response in group.responses:
            characters += len(shortened(response.response)) + len(shortened(response.prompt))
    stride = math.ceil(max(characters / _MOST_CHARACTERS, rows / _MOST_ROWS))
    return groups[:: max(1, stride)]


def _results(observed: Observed) -> Iterator[Result]:
    compared = [group for group in observed.groups if len(group.responses) > 1]
    rewards = observed.values("reward/mean")
    yield Result(value=f"{len(observed.responses):,}", name="rollouts", details=f"in {len(observed.groups):,} groups")
    if compared:
        num_dead = sum(group.is_dead for group in compared)
        yield Result(
            value=f"{100 * num_dead / len(compared):.0f} %",
            name="of the groups are dead",
            details="equal rewards, from which a group method learns nothing",
        )
    if rewards:
        yield Result(
            value=f"{rewards[-1]:.3g}", name="mean reward of the last step", details=f"first step {rewards[0]:.3g}"
        )


def _responses_table(groups: Sequence[ResponseGroup], total: int) -> Table:
    pictures: dict[str, str] = {}  # data URIs by name
    rows: list[Sequence[str | float | Fields]] = []
    for group in groups:
        for response in group.responses:
            problem: Fields = {"text": shortened(response.prompt), "picture": _picture(response, pictures)}
            row = [float(response.step), verdict(response.right), group.state, response.reward, float(response.length)]
            rows.append([*row, problem, shortened(response.ground_truth), shortened(response.response)])
    return Table(
        head=["step", "verdict", "group", "reward", "length", "problem", "answer", "response"],
        rows=rows,
        caption=f"{len(rows):,} of {total:,} responses"
        + (", of groups evenly spread over the run" if len(rows) < total else ""),
        filters=(1, 2),
        typeset=(5, 6, 7),
        pictures=list(pictures.values()),
        is_of_cards=True,
    )


def _picture(response: RecordedResponse, pictures: dict[str, str]) -> int | None:
    """Returns the number of a response's first image, of the first so many different ones that can be read."""
    if not response.images:
        return None
    name = response.images[0]
    if name not in pictures and len(pictures) < _MOST_PICTURES:
        try:
            pictures[name] = data_uri(read_bytes(Path(name), largest=LARGEST_IMAGE))
        except CepoError:  # an image of another trainer may have been moved; the row is shown without it
            return None
    return list(pictures).index(name) if name in pictures else None


def _groups_table(groups: Sequence[ResponseGroup], total: int) -> Table:
    rows = [
        [
            float(group.step),
            group.state,
            float(len(group.responses)),
            group.num_right / len(group.responses),
            statistics.fmean(response.reward for response in group.responses),
            statistics.fmean(response.length for response in group.responses),
            group.responses[0].prompt[:300],
        ]
        for group in groups
    ]
    return Table(
        head=["step", "state", "responses", "share right", "mean reward", "mean length", "problem"],
        rows=rows,
        caption=f"{len(rows):,} of {total:,} groups",
        filters=(1,),
    )
