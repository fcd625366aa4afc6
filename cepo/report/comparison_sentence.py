"""Says in one sentence how settings compare, and what speaks against comparing them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from cepo.report.run_group import ACCURACY, METHOD, RunGroup, paired_difference, seeds_of
from cepo.report.score_tables import Cell


def headline_of(settings: Sequence[RunGroup]) -> str:
    """Returns the result after training in one sentence, with 95 % intervals of differences from the first setting."""
    first, *further_settings = settings
    mean_of_first = first.at_end(ACCURACY)
    if not further_settings:
        return _of_one_setting(first)
    if len(further_settings) > 1:
        return _of_several_settings(settings)
    (second,) = further_settings
    mean_of_second = second.at_end(ACCURACY)
    difference = paired_difference(first, second)
    if isinstance(mean_of_first, str) or isinstance(mean_of_second, str) or isinstance(difference, str):
        return f"{first.label} and {second.label} cannot be compared: they share no held-out accuracy after training."
    return sentence_of_two(
        first.label,
        second.label,
        f"{mean_of_second.mean:.1f} % against {mean_of_first.mean:.1f} % after training",
        difference,
    )


def sentence_of_two(first: str, second: str, means: str, difference: Cell) -> str:
    """Returns whether `second` is ahead of `first`, by what, and with which certainty; `means` gives both accuracies.

    `difference` is second minus first, in percentage points.
    """
    points = f"{abs(difference.mean):.1f} points{_interval(difference)}"
    if difference.low is None or difference.high is None:
        direction = "above" if difference.mean >= 0 else "below"
        return f"{second} ends {points} {direction} {first}, with an unknown error: {means}."
    if difference.low <= 0 <= difference.high:
        signed = f"{difference.mean:+.1f} points{_interval(difference)}"
        return f"{second} and {first} cannot be told apart: {signed}, {means}."
    direction = "ahead of" if difference.mean > 0 else "behind"
    return f"{second} is {direction} {first} by {points}: {means}."


def _of_one_setting(setting: RunGroup) -> str:
    mean = setting.at_end(ACCURACY)
    if isinstance(mean, str):
        return f"{setting.label} has no held-out accuracy after training."
    count = "1 run" if len(setting.runs) == 1 else f"{len(setting.runs)} runs"
    return f"{setting.label} reaches {mean.text()} % held-out accuracy in {count}."


def _of_several_settings(settings: Sequence[RunGroup]) -> str:
    first, *further_settings = settings
    accuracy_of: dict[str, float] = {}
    for setting in settings:
        mean = setting.at_end(ACCURACY)
        if isinstance(mean, Cell):
            accuracy_of[setting.label] = mean.mean
    if not accuracy_of:
        return "No setting has a held-out accuracy after training."
    best = max(accuracy_of, key=lambda label: accuracy_of[label])
    differences: list[str] = []
    for setting in further_settings:
        difference = paired_difference(first, setting)
        if isinstance(difference, Cell):
            differences.append(f"{setting.label} {difference.mean:+.1f} points{_interval(difference)}")
    ending = f" From {first.label}: {'; '.join(differences)}." if differences else ""
    return f"Of {len(settings)} settings, {best} ends highest, at {accuracy_of[best]:.1f} %.{ending}"


def _interval(difference: Cell) -> str:
    """Returns the 95 % interval, of an absolute difference that of the larger minus the smaller."""
    if difference.low is None or difference.high is None:
        return ""
    return f" (95 % interval {difference.low:+.1f} to {difference.high:+.1f})"


def cautions_of(settings: Sequence[RunGroup], differing: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yields what speaks against comparing the settings."""
    last_steps: set[int] = set()
    for setting in settings:
        ends: dict[str, int] = {}
        for run in setting.runs:
            steps, _ = run.series(ACCURACY)
            ends[run.name] = max(steps, default=0)
        last_steps.update(end for end in ends.values() if end > 0)
        unvalidated_runs = [name for name, end in ends.items() if end == 0]
        if unvalidated_runs:
            yield f"{setting.label}: {', '.join(unvalidated_runs)} made no validation after training."
    if len(last_steps) > 1:
        steps = ", ".join(map(str, sorted(last_steps)))
        yield f"The last validations were made at different steps ({steps}): not all accuracies after training are comparable."
    other_keys = [key for key in differing if key != METHOD and not key.startswith("algorithm.")]
    methods = {setting.runs[0].estimator for setting in settings}
    if other_keys and len(methods) > 1:
        more = f" and {len(other_keys) - 2} more (in Runs and what differs)" if len(other_keys) > 3 else ""
        named = other_keys[:2] if more else other_keys
        yield f"More than the method differs: {', '.join(named)}{more}."
    for setting in settings:
        if len({seeds_of(run) for run in setting.runs}) < len(setting.runs):
            yield f"Some runs of {setting.label} have the same seeds: they are not independent."
    repeated = [len(setting.runs) > 1 for setting in settings]
    if any(repeated) and not all(repeated):
        single = next(setting.label for setting in settings if len(setting.runs) == 1)
        yield f"{single} has one run: its error is over problems, that of repeated settings over runs; they are not comparable."
    elif len(settings) > 1 and not any(repeated):
        yield "Each setting has one run: intervals cover the sampling of responses, not what another seed would change."


def unit_of_errors(settings: Sequence[RunGroup]) -> str:
    """Names what the standard errors of accuracies are over: runs, or of single runs (by Wilson) their problems."""
    numbers = {min(len(setting.runs), 2) for setting in settings}
    if len(numbers) > 1:
        return "runs, or of a single run over problems"
    return "problems" if numbers == {1} else "runs"


def notes_of(settings: Sequence[RunGroup]) -> Iterator[str]:
    """Yields how the numbers of the table were computed."""
    first, *further_settings = settings
    yield "Seconds are medians over steps."
    if not further_settings:
        return
    yield (
        f"Differences are from {first.label}, the first setting, paired by seed, at the last validation that both runs made; "
        "of a single pair the error is that of independent samples."
    )
    if len(further_settings) > 1:
        yield "The intervals of several differences are not widened for their number."
    seeds_of_first = {seeds_of(run) for run in first.runs}
    for setting in further_settings:
        if seeds_of_first.isdisjoint(seeds_of(run) for run in setting.runs):
            yield f"{setting.label} has no seed in common with {first.label}: its difference is not paired."
