"""Writes lab/notes/doses.md: what teachers know in three doses, their gradients' signal-to-noise, and the speed of learning."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy

from cepo.report.drawing import Chart, Series, save_figure
from lab.studies.support.study_page import wrapped
from lab.studies.support.study_parts import comparison_sentences, speed_table
from lab.studies.support.study_plan import EQUAL_RATES, PLAN, PROFILES, Comparison, Profile, comparisons, first_runs
from lab.studies.support.study_statistics import Record, Runs, read_record
from lab.studies.worlds.kinds import DOSES
from lab.support.machine import ROOT, machine_record
from lab.support.tables import table

MEASUREMENTS = ROOT / "build" / "doses"
RESULTS = ROOT / "lab" / "studies" / "results" / "doses.json"
PAGE = ROOT / "lab" / "notes" / "doses.md"
TITLES = {"chain": "answer alone", "chain-weak": "solutions, weak", "chain-strong": "solutions, strong"}
_WINDOW = 12
KNOWLEDGE, GRADIENTS = (", ".join(PLAN["doses"][part]) for part in ("knowledge", "gradients"))


def write_page(study: Path) -> None:
    """Collects what was measured and run, and writes the page and its chart."""
    if (MEASUREMENTS / "chain").is_dir():
        RESULTS.write_text(json.dumps(_collected(study), indent=1) + "\n", encoding="utf-8")
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    paragraphs = "\n\n".join(_parts(results)).split("\n\n")
    PAGE.write_text("\n\n".join(map(wrapped, paragraphs)) + "\n", encoding="utf-8")
    save_figure([*_charts(results)], ROOT / "docs" / "images" / "doses.png")


def _collected(study: Path) -> dict[str, Any]:
    known = json.loads((ROOT / "lab" / "studies" / "results" / "study.json").read_text(encoding="utf-8"))["runs"]
    batch = PLAN["doses"]["batch"]
    return {
        "machine": machine_record(threads=1),
        "measured": {
            world: {
                "knowledge": json.loads((MEASUREMENTS / world / "knowledge" / "credit.json").read_text())["knowledge"],
                "gradient": json.loads((MEASUREMENTS / world / "gradient" / "gradient.json").read_text())["gradient"],
            }
            for world in TITLES
        },
        "runs": [
            *(run for run in known if (run["world"], run["batch"]) == ("chain", batch)),
            *(record for run in first_runs(PROFILES["doses"]) if (record := read_record(run, study)) is not None),
        ],
    }


def _profile(world: str) -> Profile:
    return PROFILES["doses" if world in DOSES else "small"]


def _trained() -> list[tuple[str, Comparison]]:
    """The comparisons of runs with their worlds, in the order of doses."""
    return [(world, own) for world in TITLES for own in _comparisons(world)]


def _comparisons(world: str) -> list[Comparison]:
    profile = _profile(world)
    planned = comparisons(profile, world) if world in profile.worlds else ()
    return [other for other in planned if other.batch == PLAN["doses"]["batch"]]


def _runs(results: Mapping[str, Any], world: str, own: Comparison) -> Runs:
    return Runs(records=results["runs"], world=world, batch=own.batch, seeds=own.seeds, own_rates={})


def _parts(results: Mapping[str, Any]) -> Iterator[str]:
    yield f"# Dose and response\n\n{PLAN['doses']['text'].strip()}"
    yield "![Accuracy on the training rollouts by dose](../../docs/images/doses.png)"
    first = dict(reversed(_trained()))
    yield " ".join(
        comparison_sentences(_runs(results, world, first[world]), _profile(world)).strip()
        for world in TITLES
        if world in first
    )
    yield PLAN["doses"]["found"].strip()
    yield "## What the teachers know\n\n" + PLAN["doses"]["about_knowledge"].strip()
    yield table(
        ["dose", "teacher", "nats", "first quarter", "second", "third", "last", "limit", "nats, wrong"],
        [
            [TITLES[world], f"`{row['name']}`", *(_figure(row[key]) for key in _KEYS)]
            for world, found in results["measured"].items()
            for row in found["knowledge"]
        ],
    )
    yield "## Gradients\n\n" + PLAN["doses"]["about_gradients"].strip()
    yield table(
        ["dose", "estimator", "SNR ratio", "95 %", "direction", "95 %"],
        [
            [TITLES[world], f"`{row['name']}`", *_with_interval(row["ratio"]), *_with_interval(row["direction"])]
            for world, found in results["measured"].items()
            for row in found["gradient"]
        ],
    )
    yield "## Speed of learning\n\n" + PLAN["doses"]["about_learning"].strip()
    for world, own in _trained():
        seeds = ", ".join(map(str, own.seeds))
        yield (
            f"**{TITLES[world]}, {own.title[0].lower()}{own.title[1:]}**: {own.batch} rollouts per step, {own.steps} steps, "
            f"learning rate {EQUAL_RATES[world]:g}, run seeds {seeds}."
        )
        yield speed_table(_runs(results, world, own), own.arms, own.steps)


_KEYS = ("nats", "first", "second", "third", "last", "limit", "wrong")


def _figure(found: Mapping[str, float]) -> str:
    return f"{found['value']:.2f} ± {found['error']:.2f}"


def _with_interval(found: Mapping[str, float | None]) -> list[str]:
    value, low, high = (found[key] for key in ("value", "low", "high"))
    return ["-" if value is None else f"{value:.2f}", "-" if low is None else f"{low:.2f} to {high:.2f}"]


def _charts(results: Mapping[str, Any]) -> Iterator[Chart]:
    for world, own in _trained():
        runs = _runs(results, world, own)
        yield Chart(
            title=f"{TITLES[world]}: rollouts of the last {_WINDOW} steps",
            unit="accuracy",
            series=[_series(arm, [*runs.equal(arm).values()]) for arm in own.arms if runs.equal(arm)],
        )


def _series(arm: str, records: list[Record]) -> Series:
    curves = numpy.array([record["trained"] for record in records])
    smooth = numpy.array([numpy.convolve(curve, numpy.ones(_WINDOW) / _WINDOW, "valid") for curve in curves])
    mean, error = smooth.mean(0), smooth.std(0, ddof=1) / len(smooth) ** 0.5
    steps = [*range(_WINDOW, curves.shape[1] + 1)]
    return Series(label=arm, steps=steps, values=[*mean], low=[*(mean - error)], high=[*(mean + error)])
