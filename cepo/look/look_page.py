"""Writes the page of rollouts that any trainer wrote: what is wrong, a pair, curves, groups and responses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cepo.errors import CepoError
from cepo.files.safe_files import LARGEST_IMAGE, read_bytes
from cepo.files.trees import Fields
from cepo.look.reading import SeenRollouts
from cepo.look.text_pair import clearest_pair_section
from cepo.report.diagnosis import NOTHING_FOUND, Finding, Observed
from cepo.report.drawing import Chart, Series
from cepo.report.findings import findings_section
from cepo.report.html_page import Result, Section, Table, write_page
from cepo.report.responses import RecordedResponse, ResponseGroup, by_step
from cepo.report.shown_responses import data_uri, verdict

_MOST_CHARACTERS = 3_000_000
"""Of the responses on a page, with their prompts; of more, groups evenly spread over the run are shown."""
_MOST_ROWS = 4_000
_MOST_PICTURES = 40
_LONGEST = 8_000


def write_look_page(
    path: Path, seen: SeenRollouts, observed: Observed, findings: Sequence[Finding], *, contrast: Sequence[Section] = ()
) -> Path:
    """Writes the page and returns its path; `contrast` are parts that a model has scored."""
    pair = None if contrast else clearest_pair_section(observed.mixed)
    sections = [findings_section(findings), *contrast]
    if pair is not None:
        sections.append(pair)
    shown = _spread(observed.groups)
    return write_page(
        path,
        title=seen.place.resolve().name,
        subtitle=" ".join([seen.line() + ".", *seen.notes]),
        headline=f"{findings[0].name.capitalize()}. {findings[0].figure}" if findings else NOTHING_FOUND,
        results=list(_results(observed)),
        sections=[
            *sections,
            Section(title="Curves", charts=list(_charts(observed)), closed=False),
            Section(title="Responses", tables=[_responses_table(shown, len(observed.responses))], closed=False),
            Section(title="Groups", tables=[_groups_table(shown, len(observed.groups))]),
        ],
    )


def _spread(groups: Sequence[ResponseGroup]) -> Sequence[ResponseGroup]:
    """Returns the groups, or every second, third and so on of them, as far as a page can show their responses."""
    characters = 0
    rows = 0
    for group in groups:
        rows += len(group.responses)
        for response in group.responses:
            characters += min(_LONGEST, len(response.response)) + min(_LONGEST, len(response.prompt))
    stride = math.ceil(max(characters / _MOST_CHARACTERS, rows / _MOST_ROWS))
    return groups[:: max(1, stride)]


def _results(observed: Observed) -> Iterator[Result]:
    num_dead = sum(group.is_dead for group in observed.groups)
    rewards = observed.values("reward/mean")
    yield Result(value=f"{len(observed.responses):,}", name="rollouts", details=f"in {len(observed.groups):,} groups")
    yield Result(
        value=f"{100 * num_dead / len(observed.groups):.0f} %",
        name="of the groups are dead",
        details="equal rewards, from which a group method learns nothing",
    )
    if rewards:
        yield Result(
            value=f"{rewards[-1]:.3g}", name="mean reward of the last step", details=f"first step {rewards[0]:.3g}"
        )


def _charts(observed: Observed) -> Iterator[Chart]:
    yield Chart(
        title="Reward", unit="per response", series=_reward_series(observed), note="the band is one standard deviation"
    )
    states = [
        _series(observed, f"groups/{name}", label)
        for name, label in (("mixed", "mixed"), ("all_right", "all right"), ("all_wrong", "all wrong"))
    ]
    yield Chart(title="Groups", unit="fraction of groups", series=[series for series in states if series.steps])
    yield Chart(
        title="Length",
        unit="tokens or characters",
        series=_length_series(observed),
        note="the band reaches from the shortest to the longest",
    )
    for title, unit, name in (
        ("Responses cut by the length limit", "fraction", "response_length/clip_ratio"),
        ("Entropy", "nats per token", "rollout/entropy"),
        ("Log-prob gap of sampler and trainer", "nats", "rollout/log_prob_gap_mean"),
    ):
        series = _series(observed, name, title.lower())
        if series.steps:
            yield Chart(title=title, unit=unit, series=[series])


def _series(observed: Observed, name: str, label: str) -> Series:
    values = dict(sorted(observed.metrics.get(name, {}).items()))
    return Series(label=label, steps=list(values), values=list(values.values()), help=name)


def _reward_series(observed: Observed) -> list[Series]:
    series = [_banded(observed, "reward", lambda response: response.reward, by_deviation=True)]
    names = dict.fromkeys(name for response in observed.sample for name in response.parts)
    for name in names if len(names) > 1 else ():
        series.append(_banded(observed, name, lambda response, name=name: response.parts.get(name, math.nan)))
    return series


def _length_series(observed: Observed) -> list[Series]:
    return [_banded(observed, "length", lambda response: float(response.length), by_range=True)]


def _banded(
    observed: Observed,
    label: str,
    of: Callable[[RecordedResponse], float],
    *,
    by_deviation: bool = False,
    by_range: bool = False,
) -> Series:
    """Returns the mean of a number of the responses by step, with a band if asked."""
    means: dict[int, float] = {}
    low: list[float] = []
    high: list[float] = []
    for step, groups in by_step(observed.groups).items():
        numbers = [of(response) for group in groups for response in group.responses]
        numbers = [number for number in numbers if not math.isnan(number)] or [math.nan]
        means[step] = statistics.fmean(numbers)
        deviation = statistics.pstdev(numbers) if by_deviation else 0.0
        low.append(min(numbers) if by_range else means[step] - deviation)
        high.append(max(numbers) if by_range else means[step] + deviation)
    has_band = by_deviation or by_range
    return Series(
        label=label,
        steps=list(means),
        values=list(means.values()),
        low=low if has_band else (),
        high=high if has_band else (),
    )


def _responses_table(groups: Sequence[ResponseGroup], total: int) -> Table:
    pictures: dict[str, str] = {}  # data URIs by name
    rows: list[Sequence[str | float | Fields]] = []
    for group in groups:
        for response in group.responses:
            problem: Fields = {"text": _bounded(response.prompt), "picture": _picture(response, pictures)}
            row = [float(response.step), verdict(response.right), group.state, response.reward, float(response.length)]
            rows.append([*row, problem, _bounded(response.ground_truth), _bounded(response.response)])
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


def _bounded(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}\n[…]\n{text[-_LONGEST // 2 :]}"


def _groups_table(groups: Sequence[ResponseGroup], total: int) -> Table:
    rows: list[Sequence[str | float | Fields]] = []
    for group in groups:
        rewards = [response.reward for response in group.responses]
        lengths = [response.length for response in group.responses]
        rows.append(
            [
                float(group.step),
                group.state,
                float(len(group.responses)),
                group.num_right / len(group.responses),
                statistics.fmean(rewards),
                statistics.fmean(lengths),
                group.responses[0].prompt[:300],
            ]
        )
    return Table(
        head=["step", "state", "responses", "share right", "mean reward", "mean length", "problem"],
        rows=rows,
        caption=f"{len(rows):,} of {total:,} groups",
        filters=(1,),
    )
