"""Finds and reads the rollouts of a trainer, as they lie in a folder or a file, and says what their files lack."""

# pyright: basic
# pyarrow has no types.
from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from cepo.errors import DataError, ForeignFileError, near_path
from cepo.files.safe_files import (
    damaged_as,
    hub_folder,
    objects_in,
    open_regular,
    read_json,
    read_text,
    require_within,
)
from cepo.files.trees import Fields
from cepo.look.rows import easyr1_rows, nemo_response, prime_response, require_names, response_of, traces_of
from cepo.report.recorded_run import RunData
from cepo.report.responses import RecordedResponse
from cepo.report.run_responses import STEP_FILES, responses_of_step
from cepo.run_folder.layout import METRICS_FILE
from cepo.run_folder.records import read_metrics

MOST_ROLLOUTS = 200_000
_MOST_BYTES = 1_000_000_000
"""Of the files that are read: of long responses fewer are."""
_PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".joblib")


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a trainer writes: the names of its files, and how one of them is read."""

    name: str
    pattern: str
    read: Callable[[Path], Iterator[RecordedResponse | None]]
    """Yields the rollouts of a file; None for a row that is none."""


@dataclass(frozen=True, kw_only=True)
class SeenRollouts:
    """Rollouts that were read, by `form`; `notes` say what was left out, and `lacks` what the files do not have."""

    place: Path
    form: str
    num_files: int
    responses: Sequence[RecordedResponse] = field(repr=False)
    metrics: Mapping[str, Mapping[int, float]] = field(repr=False)
    notes: Sequence[str]
    lacks: Sequence[str]

    def line(self) -> str:
        """Returns in one line what was recognised, and what it lacks."""
        text = f"{self.form}: {len(self.responses):,} rollouts in {self.num_files:,} files"
        return f"{text}; not recorded: {', '.join(self.lacks)}" if self.lacks else text


def read_rollouts_of(place: Path, *, most: int = MOST_ROLLOUTS) -> SeenRollouts:
    """Reads the rollouts of a folder or a file, of at most about so many with whole files evenly spread over the run.

    Raises `DataError`: nothing there is known, a file is damaged, or it is a pickle, which would run code when opened.
    """
    form, files = _recognised(place)
    history = _history_beside(place) if form is TRL else []
    read = partial(_rows, is_trls=True, functions=_reward_functions(history)) if form is TRL else form.read
    number_in_first = _number_in(files[0])
    most = max(1, min(most, _MOST_BYTES * number_in_first // max(1, files[0].stat().st_size)))
    chosen = files[:: max(1, math.ceil(number_in_first * len(files) / most))]
    notes: list[str] = []
    if len(chosen) < len(files):
        notes.append(f"{len(chosen):,} of {len(files):,} files were read, evenly spread over the run.")
    if len(files) == 1 and number_in_first > most:
        notes.append(f"The first {most:,} of {number_in_first:,} rollouts were read.")
    responses: list[RecordedResponse] = []
    num_repeated = num_left_out = 0
    last_texts: list[str] = []
    for file in chosen:
        with damaged_as(file, f"cannot be read as rollouts of {form.name}"):
            rows = list(itertools.islice(read(file), most))
        of_file = [row for row in rows if row is not None]
        num_left_out += len(rows) - len(of_file)
        texts = [response.response for response in of_file]
        if texts == last_texts and len(set(texts)) > 1:
            num_repeated += 1
            continue
        last_texts = texts
        responses += of_file
    if num_repeated:
        notes.append(f"{num_repeated:,} files repeat the responses of the file before, and are left out.")
    if num_left_out:
        notes.append(
            f"{num_left_out:,} rows are left out: they have no response or no reward, failed, or fill a batch."
        )
    if not responses:
        raise DataError(f"{place}: {form.name}, but no response in it has a text and a reward")
    return SeenRollouts(
        place=place,
        form=form.name,
        num_files=len(files),
        responses=_completed(responses, place if place.is_dir() else place.parent),
        metrics=trl_metrics(history) if form is TRL else _metrics_of(place, form),
        notes=notes,
        lacks=list(_lacking(responses)),
    )


def sizes_of_files(place: Path) -> dict[Path, int]:
    """Returns the sizes in bytes of the files that `read_rollouts_of` would choose from; raises `DataError` as it does."""
    _, files = _recognised(place)
    return {file: file.stat().st_size for file in files}


def _recognised(place: Path) -> tuple[Form, list[Path]]:
    """Returns the first form of which there are files, and those in the order of their steps."""
    if place.is_file():
        _refuse_pickle(place)
        for form in FORMS:
            if place.match(form.pattern):
                return _named(form, place), [place]
        raise DataError(f"{place} has no known form; accepted: {', '.join(sorted({form.pattern for form in FORMS}))}")
    if not place.is_dir():
        raise DataError(f"{place} does not exist.{near_path(place)}")
    for form in FORMS:
        if form is OWN and not (place / METRICS_FILE).exists():
            continue
        files = sorted(place.rglob(form.pattern), key=lambda file: (_step_of(file), str(file)))
        files = [file for file in files if file.name not in _NO_ROLLOUTS and file.is_file() and file.stat().st_size]
        if files:
            for file in files:  # of a stranger's folder, which must not bring another file onto a page
                require_within(file, hub_folder(place))
            return _named(form, files[0]), files
    for file in sorted(place.iterdir()):
        _refuse_pickle(file)
    raise DataError(
        f"{place} has no rollouts: none of {', '.join(dict.fromkeys(form.pattern for form in FORMS))}. TRL writes them with "
        "log_completions=True, verl with trainer.rollout_data_dir=FOLDER, cepo with trainer.rollouts_to_log"
    )


def _refuse_pickle(file: Path) -> None:
    if file.suffix in _PICKLES:
        raise DataError(
            f"{file} may be a pickle, which can run any code when it is opened; accepted: JSON lines or Parquet"
        )


def _named(form: Form, file: Path) -> Form:
    """Returns the form with the trainer's name, if the names of a row tell it."""
    if form is not LINES:
        return form
    with open_regular(file) as opened:
        row, _ = next(objects_in(file, opened, reads_open_end=True), (None, 0))
    if row is None:
        raise DataError(f"{file} has no rows")
    if row.keys() & {"nodes", "traces"}:
        return replace(form, name="prime-rl's rollouts")
    require_names(row, str(file))
    is_verls = {"input", "output", "score"} <= row.keys()
    return replace(form, name="verl's rollout_data_dir" if is_verls else form.name)


def _number_in(file: Path) -> int:
    """Returns about how many rollouts a file has: its rows, or its lines."""
    with open_regular(file) as opened, damaged_as(file, "cannot be read"):
        if file.suffix == ".parquet":
            return pyarrow.parquet.read_metadata(opened).num_rows
        return sum(part.count(b"\n") for part in iter(partial(opened.read, 1 << 20), b""))


def _step_of(file: Path) -> int:
    """Returns the last number in a file's name, or in that of its folder, or of a folder `step_<N>` around it; 0 without."""
    folders = [folder.name for folder in file.parents if re.fullmatch(r"step_\d+", folder.name)]
    for name in (file.stem, file.parent.name, *folders):
        numbers = re.findall(r"\d+", name)
        if numbers:
            return int(numbers[-1])
    return 0


def _lines(of_row: Callable[[Fields, int], RecordedResponse | None], file: Path) -> Iterator[RecordedResponse | None]:
    """Yields the responses of a file of JSON lines."""
    step = _step_of(file)
    with open_regular(file) as opened:
        for row, _ in objects_in(file, opened, reads_open_end=True):
            for trace in traces_of(row):
                yield of_row(trace, step)


def _line(row: Fields, step: int) -> RecordedResponse | None:
    return prime_response(row, step) if "nodes" in row else response_of(row, step)


def _easyr1(file: Path) -> Iterator[RecordedResponse | None]:
    for row in easyr1_rows(read_text(file)):
        yield response_of(row, row["step"])


def _rows(file: Path, *, is_trls: bool, functions: Collection[str] = ()) -> Iterator[RecordedResponse | None]:
    """Yields the responses of a Parquet file, which is read without its columns of lists of numbers, which are long.

    Of TRL's, the columns of reward functions are those named in `functions`; if none is, every column of floats but the
    advantage. Others have the names of JSON lines.
    """
    step = _step_of(file)
    with open_regular(file) as opened:
        try:
            content = pyarrow.parquet.ParquetFile(opened, pre_buffer=False)
            schema = content.schema_arrow
            names = [column.name for column in schema if not _is_of_numbers(column.type)]
            floats = [
                field.name for field in schema if pyarrow.types.is_floating(field.type) and field.name != "advantage"
            ]
            floats = [name for name in floats if name in functions] or floats
            if not is_trls:
                require_names(dict.fromkeys(schema.names), str(file))
            for batch in content.iter_batches(batch_size=1_000, columns=names, use_threads=False):
                for row in batch.to_pylist():
                    yield response_of(row, step, scores={name: row[name] for name in floats} if is_trls else None)
        except pyarrow.ArrowException as error:
            raise DataError(f"{file} cannot be read as Parquet ({type(error).__name__})") from error


def _is_of_numbers(kind: Any) -> bool:
    return pyarrow.types.is_list(kind) and pyarrow.types.is_primitive(kind.value_type)


OWN = Form(name="a run of cepo", pattern=STEP_FILES, read=responses_of_step)
TRL = Form(name="TRL's completions", pattern="completions_*.parquet", read=partial(_rows, is_trls=True))
LINES = Form(name="JSON lines", pattern="*.jsonl", read=partial(_lines, _line))
FORMS = (
    OWN,
    TRL,
    Form(name="NeMo-RL's training data", pattern="train_data_step*.jsonl", read=partial(_lines, nemo_response)),
    Form(name="EasyR1's generations", pattern="generations*.log", read=_easyr1),
    replace(LINES, name="prime-rl's rollouts", pattern="step_*/train/effective/traces.jsonl"),
    replace(LINES, name="prime-rl's rollouts", pattern="train_rollouts.jsonl"),
    LINES,
    Form(name="a Parquet table", pattern="*.parquet", read=partial(_rows, is_trls=False)),
)
"""The forms in the order in which they are looked for: one with names of its own comes before one that many programs write."""
_NO_ROLLOUTS = (METRICS_FILE, "experiment_log.jsonl", "trainer_log.jsonl")


def _completed(responses: Sequence[RecordedResponse], folder: Path) -> list[RecordedResponse]:
    """Adds groups and verdicts where the files have none, and leaves out images that do not lie in the folder.

    Responses to one prompt follow each other in most files, where two problems may have the same text and other images: the
    size of a group is then the greatest common divisor of the numbers of equal prompts in a row. A response is right if
    its reward is more than 0 and at least half of the largest.
    """
    largest = max(response.reward for response in responses)
    runs = [list(run) for _, run in itertools.groupby(responses, key=lambda response: (response.step, response.prompt))]
    size = math.gcd(*map(len, runs))
    image_of = cache(partial(_image_in, folder))
    completed: list[RecordedResponse] = []
    for number, run in enumerate(runs):
        for place, response in enumerate(run):
            group = response.group
            if not group:
                group = f"{number}.{place // size}" if size > 1 else response.prompt
            right = response.right
            if right is None:
                right = response.reward > 0 and response.reward >= largest / 2
            images = [image for name in response.images if (image := image_of(name)) is not None]
            completed.append(replace(response, group=group, right=right, images=images))
    return completed


def _image_in(folder: Path, name: str) -> str | None:
    """Returns the path of an image; None outside the folder: a row that a stranger wrote must not bring a file onto a page."""
    try:
        path = require_within(folder / name, hub_folder(folder))
    except ForeignFileError:
        return None
    return str(path) if path.is_file() else None


def _lacking(responses: Sequence[RecordedResponse]) -> Iterator[str]:
    """Yields what no response has."""
    for name, attribute in _MAY_LACK.items():
        if all(getattr(response, attribute) in (None, "", (), []) for response in responses):
            yield name


_MAY_LACK = {
    "right answers": "ground_truth",
    "which responses were cut": "finished",
    "images": "images",
    "log-probs": "surprise",
}
_TRL_NAMES = {
    "reward": "reward/mean",
    "entropy": "rollout/entropy",
    "learning_rate": "actor/lr",
    "completions/clipped_ratio": "response_length/clip_ratio",
    "completions/mean_length": "response_length/mean",
    "completions/min_length": "response_length/min",
    "completions/max_length": "response_length/max",
    "clip_ratio/low_mean": "actor/pg_clipfrac_lower",
    "clip_ratio/high_mean": "actor/pg_clipfrac_higher",
    "sampling/sampling_logp_difference/mean": "rollout/log_prob_gap_mean",
    "eval_reward": "val/accuracy",
}
"""The names of TRL's metrics, and those of a run of cepo."""


def _metrics_of(place: Path, form: Form) -> dict[str, dict[int, float]]:
    """Returns the metrics that lie beside the rollouts of a run of cepo."""
    if form is not OWN:
        return {}
    folder = place if place.is_dir() else place.parent
    return RunData(folder=folder, rows=read_metrics(folder), config={}).curves


def _history_beside(place: Path) -> list[Fields]:
    """Returns the `log_history` of TRL's last checkpoint; an empty one without any."""
    folder = place if place.is_dir() else place.parent
    run = folder.parent if folder.name == "completions" else folder
    checkpoints = sorted(run.glob("checkpoint-*/"), key=_step_of)
    states = [folder / "trainer_state.json" for folder in checkpoints]
    present = [state for state in states if state.is_file()]
    return _history(present[-1], within=run) if present else []


def _reward_functions(history: Iterable[Fields]) -> set[str]:
    """Returns the names of the reward functions whose means TRL has logged."""
    matches = [re.fullmatch(r"rewards/(.+)/mean", name) for row in history for name in row]
    return {match[1] for match in matches if match is not None}


def trl_metrics(history: Iterable[Fields]) -> dict[str, dict[int, float]]:
    """Returns the metrics of a trainer's `log_history` under the names of a run of cepo, by step."""
    metrics: dict[str, dict[int, float]] = {}
    for row in history:
        for name, own_name in _TRL_NAMES.items():
            value = row.get(name)
            if isinstance(value, int | float):
                metrics.setdefault(own_name, {})[int(row["step"])] = float(value)
    return metrics


def _history(file: Path, *, within: Path) -> list[Fields]:
    with damaged_as(file, "is no trainer state"):
        return [row for row in read_json(file, dict, within=hub_folder(within))["log_history"] if "step" in row]
