"""Writes the study's records, and from them its page lab/notes/study.md and the page's charts."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cepo.report.drawing import save_figure
from cepo.report.score_tables import Cell
from lab.studies.support.study_parts import charts, comparison_parts, comparison_sentences, gradients_part, speed_parts
from lab.studies.support.study_plan import (
    ABLATIONS,
    ARMS,
    BASELINE,
    EQUAL_RATES,
    METHODS,
    PLAN,
    PROFILES,
    RATIO_ARM,
    RATIO_RATES,
    Profile,
    comparisons,
    first_runs,
    own_rate_runs,
    sweep,
    swept,
    trained,
)
from lab.studies.support.study_statistics import (
    SIGNIFICANT,
    STATEMENTS,
    VERDICTS,
    Record,
    Runs,
    Statement,
    arm_table,
    best_rate,
    cell,
    chosen_rates,
    final,
    holm,
    p_value,
    paired,
    read_record,
    untrained,
    verdict,
)
from lab.studies.worlds.kinds import KINDS
from lab.support.machine import ROOT, machine_record
from lab.support.tables import table


def write_study(profile: Profile, out: Path, results: Path, page: Path) -> None:
    """Writes the records of the finished runs in `out`, then page and charts; without `out`, from existing records."""
    if out.is_dir():
        _collect(profile, out, results)
    study = json.loads(results.read_text(encoding="utf-8"))
    profile = profile_of(study)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(study_page(study), encoding="utf-8")
    drawn = [chart for world in profile.worlds for chart in charts(profile, _runs(study, world))]
    notes, images = ROOT / "lab" / "notes", ROOT / "docs" / "images"
    save_figure(drawn, (images if page.parent == notes else page.parent / "images") / "study.png")


def _collect(profile: Profile, out: Path, results: Path) -> None:
    rates = {world: chosen_rates(profile, out, world) for world in profile.worlds}
    own = [run for world in profile.worlds for run in own_rate_runs(profile, world, rates[world])]
    runs = dict.fromkeys([*first_runs(profile), *own])
    records = [record for run in runs if (record := read_record(run, out)) is not None]
    head = {
        "profile": profile.name,
        "worlds": profile.worlds,
        "machine": machine_record(threads=1),
        "own_rates": rates,
        "planned": len(runs),
    }
    lines = ",\n".join(json.dumps(record) for record in records)
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(f'{json.dumps(head)[:-1]},\n"runs": [\n{lines}\n]}}\n', encoding="utf-8")


def profile_of(study: Mapping[str, Any]) -> Profile:
    return dataclasses.replace(PROFILES[study["profile"]], worlds=tuple(study["worlds"]))


def _runs(study: Mapping[str, Any], world: str, batch: int | None = None) -> Runs:
    profile = profile_of(study)
    return Runs(
        records=study["runs"],
        world=world,
        batch=batch or profile.batches[world][0],
        seeds=profile.seeds,
        own_rates=study["own_rates"][world],
    )


def study_page(study: Mapping[str, Any]) -> str:
    profile = profile_of(study)
    parts = [_head(study, profile)]
    for world in PROFILES["full"].worlds:
        if any(record["world"] == world for record in study["runs"]):
            parts += _world(study, profile, world)
        else:
            why = "Its runs are planned." if world in profile.worlds else "It was not asked for (`--worlds`)."
            parts.append(f"## {world}\n\nThe world `{world}` is not run. {why}")
    parts += [_compute(study), _limits(profile)]
    return "\n\n".join(map(wrapped, "\n\n".join(parts).split("\n\n"))) + "\n"


def wrapped(paragraph: str) -> str:
    """Wraps prose at 100 characters; leaves tables, headings and images unchanged."""
    if paragraph.startswith(("|", "#", "!")):
        return paragraph
    return textwrap.fill(paragraph, 100, break_long_words=False, break_on_hyphens=False)


def summary(study: Mapping[str, Any]) -> str:
    """Returns two sentences per world: accuracies at equal learning rates, and verdicts on the paper's statements."""
    profile = profile_of(study)
    told = [_summary(profile, runs) for world in profile.worlds if (runs := _runs(study, world)).equal(BASELINE)]
    return "\n\n".join(told) or "Nothing is run yet."


def _summary(profile: Profile, runs: Runs) -> str:
    base = runs.equal(BASELINE)
    arms = [arm for arm in trained(profile, runs.world) if arm != BASELINE]
    found = [paired(base, runs.equal(arm)) for arm in arms]
    marked: dict[bool, list[str]] = {True: [], False: []}
    for arm, differences, p in zip(arms, found, holm([p_value(each) for each in found]), strict=True):
        if p is not None and p < SIGNIFICANT:
            marked[sum(differences) > 0].append(arm)
    told = [
        f"{' and '.join(names)} {'end' if len(names) > 1 else 'ends'} {side}"
        for names, side in ((marked[True], "above"), (marked[False], "below"))
        if names
    ]
    start, end = ([measure(record) for record in base.values()] for measure in (untrained, final))
    tested = [verdict(each.differences(runs.equal)) for each in STATEMENTS]
    counts = ", ".join(f"{tested.count(each)} {each}" for each in VERDICTS if each in tested)
    tests = sum(p_value(each) is not None for each in found)
    differing = " and ".join(told) + " it" if told else "no other arm differs from it significantly"
    judged = (
        f"{differing} (p < {SIGNIFICANT} by Holm over {tests} tests)" if tests else "one seed does not tell arms apart"
    )
    return (
        f"On `{runs.world}` at equal learning rates, {profile.rollouts:,} rollouts and {len(base)} of "
        f"{len(profile.seeds)} seeds, {BASELINE} raises sampled accuracy from {cell(start)} to {cell(end)} %, and {judged}. "
        f"Verdicts on {len(tested)} statements of the paper: {counts}.{comparison_sentences(runs, profile)}"
    )


def _head(study: Mapping[str, Any], profile: Profile) -> str:
    machine, done = study["machine"], len(study["runs"])
    state = "All planned runs are done." if done == study["planned"] else (
        f"**{done} of {study['planned']} planned runs are done.** The others are marked as not run. The same command "
        "continues with them and updates this page."
    )  # fmt: skip
    swept_rates = ", ".join(f"{rate:g}" for rate in profile.rates) or "none"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    batches = "; ".join(
        f"{world}: "
        + " and ".join(f"{batch} per step ({profile.rollouts // batch} steps)" for batch in profile.batches[world])
        for world in profile.worlds
    )
    equal = " and ".join(f"{EQUAL_RATES[world]:g} ({world})" for world in profile.worlds)
    held_out = "; ".join(f"{world}: {profile.problems[world][1]} in each set" for world in profile.worlds)
    seeds = PLAN["world_seeds"]
    facts = [
        ["date, machine", f"{machine['date']}, {machine['cores']} cores, one thread per run"],
        ["versions", f"Python {machine['python']}, {versions}; transformers generator, float32"],
        ["rollouts per run", f"{profile.rollouts:,}, in groups of 8; {batches}"],
        ["run seeds", f"{_listed(profile.seeds)}: they set the order of problems and all sampling"],
        [
            "learning rates",
            f"equal: {equal}; own: the best of {swept_rates} for each; paper's ratio: {PLAN['paper_ratio']['factor']} times the "
            f"equal rate for {RATIO_ARM}",
        ],
        ["evidence", "lambda falls from 0.5 to 0 over the first half of the steps, clip radius 0.5, as in the paper"],
        ["held-out problems", f"{held_out}; one response each at temperature 1 and one greedy"],
    ]
    return f"""# The study

![Accuracy on the training rollouts, with two kinds of references](../../docs/images/doses.png)

{PLAN["beginning"].strip()}

## In numbers

`bash scripts/study.sh {profile.name} --worlds {" ".join(profile.worlds)}` generates this page, its verdicts
included, from `lab/studies/results/study.json`.

{summary(study)}

{state}

{table(["condition", "value"], facts)}

**Tuning**: the reported problems are those of world seed {seeds["reported"]}. Learning rates are chosen on the training
and held-out problems of world seed {seeds["tuning"]} with run seed {_listed(profile.tuning_seeds)}, which no other table
uses. In `shapes` both world seeds use the same small set of texts, with different images. Batch size, number of steps and
the equal rate were fixed before the runs, with these exceptions. {PLAN["chosen_later"]}

**Errors** are standard errors over run seeds, because the responses of a run depend on each other. They apply to these
held-out problems. Differences are in percentage points and paired by seed; p is that of a two-sided t test on them.

**Multiplicity**: p is adjusted by Holm's method within each table, so the chance of any false difference in a table is at
most {SIGNIFICANT:.0%}. The verdicts on single statements are not adjusted: of {len(STATEMENTS)} true null hypotheses, about
one would appear as seen or reversed."""


def _world(study: Mapping[str, Any], profile: Profile, world: str) -> Iterator[str]:
    runs = _runs(study, world)
    yield f"## {world}: equal learning rates"
    for batch in profile.batches[world]:
        own = _runs(study, world, batch)
        yield f"{batch} rollouts per step, learning rate {EQUAL_RATES[world]:g}."
        yield arm_table(own.equal, trained(profile, world), profile.seeds)
    if world == "shapes":
        yield (
            "The arm `oracle` exists in the chain world only, whose true credit can be computed. In `shapes` it has to be "
            "sampled, as `cepo credit` does: with 8 continuations of every prefix, that takes about 200 times as many responses "
            "as a training step samples."
        )
    yield f"![Held-out and greedy accuracy over steps](../../docs/images/study.png)\n\n{_curve_note(profile, world)}"
    yield from speed_parts(runs, trained(profile, world), profile)
    yield from comparison_parts(runs, profile)
    if profile.rates:
        yield from _rates(study, profile, runs)
    yield from _held_out(runs, trained(profile, world))
    yield gradients_part(runs)
    yield f"## {world}: ablations of {PLAN['ablated']}"
    if world in profile.ablations:
        yield f"Each arm changes one setting, at learning rate {EQUAL_RATES[world]:g} and with equally many rollouts."
        yield PLAN["mended_since"]
        yield from (
            f"**{name}**\n\n"
            + arm_table(runs.equal, [BASELINE, PLAN["ablated"], *(arm.name for arm in arms)], profile.seeds)
            for name, arms in ABLATIONS.items()
        )
    else:
        names = ", ".join(ABLATIONS)
        yield f"Not run: {names}. In this world only the profile `full` has them."
    yield from _statements(profile, runs)


def _rates(study: Mapping[str, Any], profile: Profile, runs: Runs) -> Iterator[str]:
    yield f"## {runs.world}: the paper's ratio of learning rates"
    yield f"{RATIO_ARM} at {RATIO_RATES[runs.world]:g}, the others at {EQUAL_RATES[runs.world]:g}."
    arms = [arm for arm in PLAN["panels"]["the paper's methods"] if arm in profile.arms]
    yield arm_table(runs.paper, arms, profile.seeds)
    yield f"## {runs.world}: each method at its own learning rate"
    yield (
        "Final sampled accuracy in % on the tuning world's problems. A method's own rate is the one with the highest mean, or "
        "the lowest of equal ones. A control uses the rate of the arm that it controls."
    )
    rows: list[list[str]] = []
    for arm in swept(profile):
        own = [
            record
            for record in study["runs"]
            if record["tuning"] and record["arm"] == arm and record["world"] == runs.world
        ]
        is_done = len(own) == len(sweep(profile, runs.world, arm))
        cells = [cell([final(record) for record in own if record["rate"] == rate]) for rate in profile.rates]
        rows.append([arm, *cells, f"{best_rate(own):g}" if is_done else "not known"])
    yield table(["arm", *(f"{rate:g}" for rate in profile.rates), "own rate"], rows)
    yield "Results at these rates, on the reported problems:"
    own_rate = lambda arm: runs.own_rates.get(ARMS[arm].rate_of or arm, 0.0)  # noqa: E731
    yield arm_table(lambda arm: runs.at(arm, own_rate(arm)), trained(profile, runs.world), profile.seeds)


def _held_out(runs: Runs, arms: Sequence[str]) -> Iterator[str]:
    yield f"## {runs.world}: held-out sets"
    splits = KINDS[runs.world].held_out
    if not splits:
        yield (
            f"The only held-out set of `{runs.world}` has the same distribution as the training problems; the tables above show "
            "its accuracy. Only the chain world has sets with unseen numbers, unseen shapes, longer chains and distractors."
        )
        return
    rows = [
        [arm, *(cell([record["held_out"][split]["sampled"] for record in runs.equal(arm).values()]) for split in splits),
         *(cell([record["held_out"][split]["greedy"] for record in runs.equal(arm).values()]) for split in splits)]
        for arm in arms
    ]  # fmt: skip
    yield table(["arm", *splits, *(f"{split}, greedy" for split in splits)], rows)


def _statements(profile: Profile, runs: Runs) -> Iterator[str]:
    yield f"## {runs.world}: the paper's statements"
    yield (
        "Each statement is tested as the sign of a mean over seeds, which is positive if the paper's statement holds here. "
        f"The verdict is *seen* if the mean is positive and p < {SIGNIFICANT}, *reversed* if it is negative and "
        f"p < {SIGNIFICANT}, and *not seen* otherwise. A single run has no error and gets no verdict. Statements on accuracy "
        "use sampled accuracy; those on methods are tested at equal learning rates and at the paper's ratio, those on ablations "
        "at equal rates. Statements on evidence compare "
        "the last with the first third of the steps that have evidence. A method *absorbs* the answer's effect as far as the "
        f"leak probe's gap on wrong responses moves towards 0, compared with {BASELINE}."
    )
    rows = [_statement_row(statement, runs) for statement in STATEMENTS]
    yield table(["about", "statement", "equal rates", "verdict", "paper's ratio", "verdict"], rows)


def _statement_row(statement: Statement, runs: Runs) -> list[str]:
    found = statement.differences(runs.equal)
    if statement.kind == "absorbs" and found:
        spread = Cell.over(found)
        text = f"{spread.mean:+.3f}" + ("" if spread.error is None else f" ± {spread.error:.3f}")
    else:
        text = cell(found, signed=True)
    row = [statement.topic, statement.text, text, verdict(found)]
    # Ablations are trained at the equal rate alone.
    if statement.kind != "above" or not {statement.first, statement.second} <= {"untrained", *METHODS}:
        return [*row, "", ""]
    other = statement.differences(runs.paper)
    return [*row, cell(other, signed=True), verdict(other)]


def _compute(study: Mapping[str, Any]) -> str:
    records: Sequence[Record] = study["runs"]
    rows = []
    for name, own in (
        ("reported", [r for r in records if not r["tuning"]]),
        ("sweep", [r for r in records if r["tuning"]]),
    ):
        hours = sum(record["processor_seconds"] for record in own) / 3600
        counts = [sum(record[key] for record in own) for key in ("rollouts", "generate", "teachers", "update")]
        rows.append([name, len(own), f"{hours:.2f}", *(f"{count:,}" for count in counts)])
    mean = sum(record["processor_seconds"] for record in records) / max(1, len(records))
    head = ["runs", "number", "processor hours", "rollouts", "tokens sampled", "tokens of teachers", "tokens updated"]
    return (
        "## Compute\n\nToken counts of teachers and updates include the context. Processor time includes validation and "
        f"excludes interrupted sessions. A run took {mean:.0f} s on average; at that rate the {study['planned']} "
        f"planned runs take {mean * study['planned'] / 3600:.1f} hours.\n\n{table(head, rows)}"
    )


def _limits(profile: Profile) -> str:
    full = {size for world in profile.worlds for size in PROFILES["full"].batches[world]}
    used = {size for world in profile.worlds for size in profile.batches[world]}
    used |= {other.batch for world in profile.worlds for other in comparisons(profile, world)}
    missing = sorted(full - used)
    batches = f"Only the profile `full` has batches of {' and '.join(map(str, missing))} rollouts. " if missing else ""
    return (
        f"## Limits\n\nThe profile `{profile.name}` trains a model of 1.3 million weights for {profile.rollouts:,} rollouts "
        "on generated problems. A verdict of *not seen* does not exclude a difference below about twice its error. "
        f"{batches}Nothing here is measured on the paper's models or data ([results](../../docs/results.md))."
    )


def _curve_note(profile: Profile, world: str) -> str:
    return f"Means over seeds at equal rates with {profile.batches[world][0]} rollouts per step; bands show one standard error."


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"
