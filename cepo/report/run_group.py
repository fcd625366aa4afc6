"""Decides which runs have the same setting, summarises them, and compares two settings by their runs with equal seeds.

The same is all that can change training, apart from seeds, names, paths and loggers.
"""

from __future__ import annotations

import filecmp
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cepo.algorithms.registry import METHODS
from cepo.config.listing import REQUIRED, settings_of
from cepo.files.trees import leaves
from cepo.report.recorded_run import COUNTS, RunData, as_yaml
from cepo.report.score_tables import Cell
from cepo.run_folder.layout import CONFIG_FILE
from cepo.run_folder.own_records import is_own_record

METHOD = "algorithm.adv_estimator"
UNSET = "not set"
_DATA_FILES = ("data.train_files", "data.val_files")
# Beginnings of the settings that cannot change what is trained or how it is measured: names, records, waiting.
_MAY_DIFFER = (
    "trainer.experiment_name",
    "trainer.project_name",
    "trainer.logger",
    "trainer.save_",
    "trainer.launcher",
    "trainer.load_checkpoint_path",
    "trainer.find_last_checkpoint",
    "trainer.accept_changes",
    "trainer.rollouts_",
    "trainer.val_generations_to_log",
    "trainer.val_freq",
    "trainer.val_before_train",
    "trainer.start_timeout",
    "trainer.stage_timeout",
    "trainer.ray_address",
    "trainer.max_restarts",
)
_LONGEST_LABEL = 28
ACCURACY, GREEDY, _ = COUNTS
_TWO_SIDED_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's t for a 95 % interval, by degrees of freedom from 1 to 30."""


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in their seeds. `label` names the method and what distinguishes it from other settings."""

    label: str
    runs: tuple[RunData, ...] = field(repr=False)

    def at_end(self, name: str, *, before: bool = False) -> Cell | str:
        """Returns the mean over runs of their last accuracies, in percent, after or before training; empty if a run has none."""
        last_accuracies: list[Cell] = []
        for run in self.runs:
            accuracies = [cell for step, cell in run.accuracies(name).items() if (step == 0) == before]
            if not accuracies:
                return ""
            last_accuracies.append(accuracies[-1])
        if len(last_accuracies) == 1:  # it has no error over runs, so that of its samples stands in
            return replace(last_accuracies[0].percent, low=None, high=None)
        return Cell.over([100 * accuracy.mean for accuracy in last_accuracies])

    @property
    def seconds_per_step(self) -> Cell | str:
        """The mean over runs of their median step, in seconds; empty if a step took no time or none was measured."""
        medians: list[float] = []
        for run in self.runs:
            _, seconds = run.series("timing_s/step")
            if seconds:
                medians.append(statistics.median(seconds))
        if not medians or min(medians) <= 0:
            return ""
        return Cell.over(medians)


def paired_difference(first: RunGroup, second: RunGroup) -> Cell | str:
    """Returns the mean difference in accuracy, second minus first, in percentage points, with its 95 % interval.

    Runs with equal seeds form pairs, which are compared at the last validation that both made. Empty if a pair has no
    common validation after the start of training, or an accuracy is not a number. Without pairs, the result is the
    difference of the means at each run's end. With fewer than two pairs the error is that of two independent means. The
    interval is Student's over pairs or runs, and the normal one if all errors are those of the samples of single runs.
    """
    mean_of_first = first.at_end(ACCURACY)
    mean_of_second = second.at_end(ACCURACY)
    if isinstance(mean_of_first, str) or isinstance(mean_of_second, str):
        return ""
    differences = _differences_of_pairs(first, second)
    if differences is None or not all(map(math.isfinite, [mean_of_first.mean, mean_of_second.mean, *differences])):
        return ""
    if len(differences) > 1:
        return Cell.over(differences).with_interval(_quantile(len(differences) - 1))
    difference = mean_of_second.less(mean_of_first)
    if differences:
        difference = replace(difference, mean=differences[0])
    numbers_of_runs = [len(setting.runs) for setting in (first, second) if len(setting.runs) > 1]
    return (
        difference.with_interval(_quantile(min(numbers_of_runs) - 1)) if numbers_of_runs else difference.with_interval()
    )


def _differences_of_pairs(first: RunGroup, second: RunGroup) -> Sequence[float] | None:
    """Returns the differences of runs with equal seeds; None if a pair has no validation in common after the start."""
    partners = {seeds_of(run): run for run in first.runs}
    differences: list[float] = []
    for run in second.runs:
        partner = partners.get(seeds_of(run))
        if partner is None:
            continue
        accuracies = run.values_by_step(ACCURACY)
        partners_accuracies = partner.values_by_step(ACCURACY)
        common_steps = [step for step in accuracies if step > 0 and step in partners_accuracies]
        if not common_steps:
            return None
        last_step = max(common_steps)
        differences.append(100 * (accuracies[last_step] - partners_accuracies[last_step]))
    return differences


def _quantile(degrees_of_freedom: int) -> float:
    """Returns Student's t for a 95 % interval."""
    if degrees_of_freedom <= len(_TWO_SIDED_95):
        return _TWO_SIDED_95[degrees_of_freedom - 1]
    return 1.96 + 2.4 / degrees_of_freedom  # to the third digit


def differing_keys(configs: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns the settings in which the runs differ, in alphabetical order."""
    keys = sorted(set(itertools.chain.from_iterable(configs)))
    return [key for key in keys if _differs(key, configs)]


def configs_of(runs: Sequence[RunData]) -> list[dict[str, str]]:
    """Returns the settings of each run as text, with defaults.

    A relative path is spelled as another run spells it in full, and a data file as the first run does that read one of the
    same content. Only the files that this user's own runs name are opened.
    """
    defaults: dict[str, str] = {}
    for setting in settings_of():
        if setting.default is not REQUIRED and not _is_of_methods(setting.key):
            defaults[setting.key] = as_yaml(setting.default)
    configs: list[dict[str, str]] = []
    for run in runs:
        recorded = {key: as_yaml(value) for key, value in leaves(run.config)}
        configs.append(defaults | recorded)
    for config in configs:
        for key, value in config.items():
            longer = [other_config[key] for other_config in configs if other_config.get(key, "").endswith(f"/{value}")]
            if longer:
                config[key] = longer[0]
    are_own = [is_own_record(run.folder / CONFIG_FILE) for run in runs]
    own_configs = list(itertools.compress(configs, are_own))
    for key in _DATA_FILES:
        files: list[str] = []
        for config in own_configs:
            file = config.get(key)
            if file is None:
                continue
            config[key] = next((earlier for earlier in files if _are_equal_files(file, earlier)), file)
            files.append(config[key])
    return configs


def _are_equal_files(first: str, second: str) -> bool:
    """Returns whether two names are of files with one content, which a data set has in every folder."""
    return Path(first).is_file() and Path(second).is_file() and filecmp.cmp(first, second, shallow=False)


def _differs(key: str, configs: Sequence[Mapping[str, str]]) -> bool:
    """Returns whether runs differ in a setting that can change training; in one of some methods, between their runs."""
    values = {config.get(key, UNSET) for config in configs if key in config or not _is_of_methods(key)}
    return len(values) > 1 and not _is_seed(key) and not key.startswith(_MAY_DIFFER)


def _is_of_methods(key: str) -> bool:
    """Returns whether only some methods read a setting, so that the runs of others do not record it."""
    section, _, name = key.partition(".")
    return section == "algorithm" and ("." in name or name in METHODS.shared)


def labels_of(methods: Sequence[str], values: Sequence[Sequence[str]], keys: Sequence[str]) -> Iterator[str]:
    """Yields a short label per setting: its method, then the value that differs within the method, or else a number."""
    for method, values_of_setting in zip(methods, values, strict=True):
        values_of_method = [row for row, name in zip(values, methods, strict=True) if name == method]
        varied_places: list[int] = []
        for place in range(len(keys)):
            variants = {row[place] for row in values_of_method}
            if len(variants) > 1:
                varied_places.append(place)
        if not varied_places:
            yield method
            continue
        place = varied_places[0]
        _, _, name = keys[place].rpartition(".")
        label = f"{method}, {name}={values_of_setting[place]}"
        if len(varied_places) == 1 and len(label) <= _LONGEST_LABEL:
            yield label
        else:
            yield f"{method} ({values_of_method.index(values_of_setting) + 1})"


def seeds_of(run: RunData) -> tuple[tuple[str, str], ...]:
    seeds = [(key, str(value)) for key, value in leaves(run.config) if _is_seed(key)]
    return tuple(sorted(seeds))


def _is_seed(key: str) -> bool:
    return key.rpartition(".")[2] == "seed"
