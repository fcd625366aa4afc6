"""Rows are checked once: what is kept, what makes rows be checked again, and the processes that help."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from case_files import cases
from datasets import Dataset
from generator_cases import picture
from isolation import own_caches
from json_files import write_lines

from cepo.config.schema import DataConfig
from cepo.data import row_check
from cepo.data.dataset import ProblemSet
from cepo.data.rows import RowMeasure, RowReader
from cepo.data.tables import read_source
from cepo.errors import ConfigError, DataError
from cepo.files.own_cache import cache_folder
from cepo.models.processing import Processing

Check = Callable[..., ProblemSet]
ALL = ["<image>a", "<image>b", "c", "<image><image>d"]


@pytest.fixture(autouse=True)
def _kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each check is kept, however fast, and one process does it."""
    monkeypatch.setattr(row_check, "TRIAL_SECONDS", -1.0)
    monkeypatch.setattr(row_check, "_most_processes", lambda: 1)
    with own_caches(tmp_path / "cache"):
        yield


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts of the rows that are measured in this process, in order."""
    prompts: list[str] = []
    original = RowReader.measure

    def noting(reader: RowReader, row: Any) -> RowMeasure:
        prompts.append(row["prompt"])
        return original(reader, row)

    monkeypatch.setattr(RowReader, "measure", noting)
    return prompts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three images, and rows of which the second is bad and the last has two images, one of them another row's."""
    for number in range(3):
        picture(number).save(tmp_path / f"{number}.png")
    rows = [
        {"prompt": "<image>a", "answer": "1", "images": ["0.png"]},
        {"prompt": "<image>b", "answer": "", "images": ["1.png"]},
        {"prompt": "c", "answer": "3", "images": []},
        {"prompt": "<image><image>d", "answer": "4", "images": ["2.png", "0.png"]},
    ]
    write_lines(tmp_path / "train.jsonl", rows)
    return tmp_path


@pytest.fixture
def check(folder: Path, tiny_processing: Processing) -> Check:
    def checked(source: str = "", processing: Processing = tiny_processing, **settings: Any) -> ProblemSet:
        usual: dict[str, Any] = {"image_dir": str(folder), "min_pixels": None, "skip_bad_rows": True}
        usual["max_prompt_length"] = 4096
        name = source or str(folder / "train.jsonl")
        rules = DataConfig(train_files=name, **(usual | settings))
        return ProblemSet(name, rules, processing)

    return checked


def ids(problems: ProblemSet) -> list[str]:
    return [problem.prompt_id for problem in problems]


# What is kept


def test_a_second_start_measures_no_row(check: Check, measured: list[str], caplog: pytest.LogCaptureFixture) -> None:
    first = check()
    assert measured == ALL
    caplog.clear()
    second = check()
    assert measured == ALL
    for problems in (first, second):
        assert ids(problems) == ["0", "2", "3"]
        assert problems.skipped == {"bad": 1}
        assert problems.most_visuals == (2, 0)
        assert problems.content() == first.content()
        assert problems.image_probe() == first.image_probe()
    assert "1 bad rows are left out: row 1: column 'answer' is empty" in caplog.text


def test_a_kept_bad_row_is_an_error_if_it_must_be(check: Check, measured: list[str]) -> None:
    check()
    with pytest.raises(DataError, match="row 1: column 'answer' is empty"):
        check(skip_bad_rows=False)
    assert measured == ALL


def test_a_check_of_a_moment_is_not_kept(check: Check, measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_check, "TRIAL_SECONDS", 60.0)
    check()
    check()
    assert measured == ALL + ALL
    assert list(cache_folder("checks").iterdir()) == []


def rewritten_with_its_times(file: Path, old: str, new: str) -> None:
    """Changes a file's content; its size and the time of its last change stay."""
    status = file.stat()
    content = file.read_text(encoding="utf-8")
    assert len(old) == len(new)
    assert old in content
    file.write_text(content.replace(old, new), encoding="utf-8")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_rewrite_with_size_and_time_kept_is_checked(check: Check, folder: Path, measured: list[str]) -> None:
    check()
    rewritten_with_its_times(folder / "train.jsonl", '"answer": "3"', '"answer": "9"')
    check()
    assert measured == ALL + ALL


@pytest.mark.parametrize(
    "change",
    cases(__file__, "decisive_settings.yaml"),
    ids=lambda change: next(iter(change)),
)
def test_a_setting_that_matters_makes_rows_be_checked(
    check: Check, folder: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    monkeypatch.chdir(folder)
    check()
    check(**change)
    assert measured == ALL + ALL


@pytest.mark.parametrize("change", [{"seed": 7}, {"rollout_batch_size": 7}, {"shuffle": False}])
def test_other_settings_check_no_row_again(check: Check, measured: list[str], change: dict[str, Any]) -> None:
    check()
    check(**change)
    assert measured == ALL


def test_another_longest_prompt_needs_no_new_check(check: Check, measured: list[str]) -> None:
    """The row without an image is the shortest. The limit is applied to what is kept, as it is to new measures."""
    lengths = check()._stats.lengths
    shortest = int(lengths[2])
    assert 0 < shortest < min(lengths[0], lengths[3])
    problems = check(max_prompt_length=shortest)
    assert ids(problems) == ["2"]
    assert problems.skipped == {"bad": 1, "overlong": 2}
    words = f"row 0: the prompt has {lengths[0]} tokens .*data.max_prompt_length is {shortest}"
    with pytest.raises(DataError, match=words):
        check(max_prompt_length=shortest, filter_overlong_prompts=False)
    assert measured == ALL


def test_a_changed_format_prompt_makes_rows_be_checked(check: Check, folder: Path, measured: list[str]) -> None:
    template = folder / "wording.jinja"
    template.write_text("{{ content }} Box it.", encoding="utf-8")
    first = check(format_prompt=str(template))
    rewritten_with_its_times(template, "Box", "Fit")
    check(format_prompt=str(template))
    assert first[0].text == "<image>a Box it."
    assert measured == ALL + ALL


def test_a_slice_and_the_order_of_files_make_a_new_check(check: Check, folder: Path, measured: list[str]) -> None:
    check()
    check(f"{folder}/train.jsonl@train[:3]")
    assert measured == [*ALL, *ALL[:3]]
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    for name, first, second in (("x", rows[:2], rows[2:]), ("y", rows[2:], rows[:2])):
        (folder / name).mkdir()
        write_lines(folder / name / "train-0-of-2.jsonl", first)
        write_lines(folder / name / "train-1-of-2.jsonl", second)
    check(str(folder / "x"))
    check(str(folder / "y"))
    assert measured[7:] == [*ALL, *ALL[2:], *ALL[:2]]


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json"])
def test_a_changed_file_of_the_model_makes_rows_be_checked(
    check: Check, tiny_model_folder: Path, tmp_path: Path, measured: list[str], name: str
) -> None:
    model = shutil.copytree(tiny_model_folder, tmp_path / "model")
    files = sorted(file.name for file in model.iterdir())
    if name not in files:
        name = next(file for file in files if "processor" in file or "template" in file)
    check(processing=Processing(str(model)))
    check(processing=Processing(str(model)))
    assert measured == ALL
    file = model / name
    file.write_bytes(file.read_bytes() + b"\n")
    check(processing=Processing(str(model)))
    assert measured == ALL + ALL


def test_a_variable_of_the_template_makes_rows_be_checked(
    check: Check, tiny_model_folder: Path, tiny_processing: Processing, measured: list[str]
) -> None:
    template = f"{tiny_processing.template.text}{{% if brief %}}Answer with a word.{{% endif %}}"
    lengths: list[int] = []
    for is_brief in (False, True):
        processing = Processing(
            str(tiny_model_folder), chat_template=template, chat_template_kwargs={"brief": is_brief}
        )
        lengths.append(int(check(processing=processing)._stats.lengths[2]))
    assert measured == ALL + ALL
    assert lengths[0] < lengths[1]


def test_a_check_is_kept_in_parts(check: Check, measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a check has finished before it is interrupted is found again."""
    monkeypatch.setattr(row_check, "ROWS_TOGETHER", 2)
    original = RowReader.measure

    def interrupted(reader: RowReader, row: Any) -> RowMeasure:
        if row["prompt"] == "<image><image>d":
            raise KeyboardInterrupt
        return original(reader, row)

    with monkeypatch.context() as patch:
        patch.setattr(RowReader, "measure", interrupted)
        with pytest.raises(KeyboardInterrupt):
            check()
    assert measured == ALL[:3]
    assert ids(check()) == ["0", "2", "3"]
    assert measured == [*ALL[:3], *ALL[2:]]


# Files that rows name


def test_a_replaced_image_makes_its_rows_alone_be_checked(check: Check, folder: Path, measured: list[str]) -> None:
    """The image of the first row is one of the last row's too; it becomes four times as large, with its old time."""
    check()
    status = (folder / "0.png").stat()
    picture(9, (128, 128)).save(folder / "new.png")
    os.utime(folder / "new.png", ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(folder / "new.png", folder / "0.png")
    for _ in range(2):
        problems = check()
        assert measured == [*ALL, ALL[0], ALL[3]]
        assert problems[0].images[0].size == (128, 128)
        assert problems._stats.lengths[0] > problems._stats.lengths[2]


def test_an_image_that_vanishes_and_comes_back_is_seen(check: Check, folder: Path, measured: list[str]) -> None:
    check()
    (folder / "2.png").rename(folder / "away.png")
    for _ in range(2):
        assert ids(check()) == ["0", "2"]
    (folder / "away.png").rename(folder / "2.png")
    assert ids(check()) == ["0", "2", "3"]
    assert measured == [*ALL, ALL[3], ALL[3]]


def test_an_image_that_comes_late_makes_its_row_good(
    check: Check, folder: Path, measured: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "2.png").rename(folder / "away.png")
    assert check().skipped == {"bad": 2}
    (folder / "away.png").rename(folder / "2.png")
    caplog.clear()
    problems = check()
    assert ids(problems) == ["0", "2", "3"]
    assert problems.skipped == {"bad": 1}
    assert "row 3" not in caplog.text
    assert measured == [*ALL, ALL[3]]


def test_a_failed_download_is_tried_again(check: Check, folder: Path, measured: list[str]) -> None:
    """Nothing answers at port 9 of this machine; the row is bad for as long as that is so and no longer."""
    rows: list[dict[str, Any]] = [
        {"prompt": "<image>a", "answer": "1", "images": ["http://127.0.0.1:9/figure.png"]},
        {"prompt": "b", "answer": "2"},
    ]
    write_lines(folder / "train.jsonl", rows)
    for _ in range(2):
        assert len(check(image_hosts=["http://127.0.0.1:9"])) == 1
    assert measured.count("b") == 1
    assert measured.count("<image>a") > 1


# What is kept is not trusted blindly


@pytest.mark.parametrize("change", ["cut", "written"])
def test_a_mapped_file_that_changes_ends_the_run_with_its_name(check: Check, change: str) -> None:
    """Following what was cut would end the process by a signal."""
    problems = check()
    (copy,) = cache_folder("rows").rglob("*.arrow")
    if change == "cut":
        os.truncate(copy, 10)
    else:
        os.utime(copy)
    with pytest.raises(ConfigError, match=rf"{copy} was changed while the run was using it"):
        problems[0]


def test_a_users_own_arrow_file_may_be_written_anew(tmp_path: Path) -> None:
    dataset = Dataset.from_dict({"prompt": ["a", "b"], "answer": ["1", "2"]})
    dataset.save_to_disk(str(tmp_path / "saved"))
    rows = read_source(str(tmp_path / "saved"))
    (file,) = (tmp_path / "saved").glob("*.arrow")
    for content in (file.read_bytes().replace(b"1", b"9"), b""):
        file.write_bytes(content)
        assert [row["answer"] for row in rows] == ["1", "2"]


def test_data_that_change_as_they_are_read_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cepo.data import tables

    original = tables._text_part

    def replaced(*arguments: Any) -> Any:
        rewritten_with_its_times(folder / "train.jsonl", '"answer": "3"', '"answer": "9"')
        return original(*arguments)

    monkeypatch.setattr(tables, "_text_part", replaced)
    with pytest.raises(ConfigError, match=r"train\.jsonl changed while it was read; start again"):
        read_source(str(folder / "train.jsonl"))


def test_without_a_cache_each_process_checks_the_rows(
    check: Check, folder: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "train.jsonl"))
    assert len(check()) == 3
    assert measured == ALL


# Processes


@pytest.fixture
def helped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes check the rows."""
    monkeypatch.setattr(row_check, "_most_processes", lambda: 2)


def many_rows(folder: Path, number: int = 200, bad: Sequence[int] = ()) -> None:
    rows: list[dict[str, Any]] = []
    for row in range(number):
        answer = "" if row in bad else str(row)
        rows.append({"prompt": f"<image>row {row}", "answer": answer, "images": [f"{row % 3}.png"]})
    write_lines(folder / "train.jsonl", rows)


@pytest.mark.heavy
@pytest.mark.usefixtures("helped")
def test_two_processes_find_what_one_finds(check: Check, folder: Path, measured: list[str]) -> None:
    many_rows(folder, bad=(50, 190))
    problems = check()
    assert measured == []
    assert problems.skipped == {"bad": 2}
    assert ids(problems) == [str(row) for row in range(200) if row not in (50, 190)]
    assert check().content() == problems.content()
    assert measured == []


@pytest.mark.heavy
@pytest.mark.usefixtures("helped")
def test_signals_that_the_caller_holds_stay_held(check: Check, folder: Path) -> None:
    many_rows(folder)
    for pixels, held in ((4096, {signal.SIGINT}), (8192, {signal.SIGTERM})):
        mask_before = signal.pthread_sigmask(signal.SIG_SETMASK, held)
        try:
            check(max_pixels=pixels)  # another setting, so that rows are checked anew
            assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == held
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)


@pytest.mark.heavy
@pytest.mark.usefixtures("helped")
def test_the_first_bad_row_is_named_whoever_checks_it(check: Check, folder: Path) -> None:
    many_rows(folder, bad=(90, 91, 120, 160, 199))
    with pytest.raises(DataError, match=r"train\.jsonl, row 90: column 'answer' is empty"):
        check(skip_bad_rows=False)


@pytest.mark.heavy
@pytest.mark.usefixtures("helped")
def test_a_setting_at_fault_is_an_error_in_any_process(check: Check, folder: Path) -> None:
    """Row 150 is the first with a mark for an image, and the column of images does not exist."""
    rows = [{"prompt": f"row {row}", "answer": "1"} for row in range(150)]
    rows += [{"prompt": f"<image>row {row}", "answer": "1"} for row in range(150, 200)]
    write_lines(folder / "train.jsonl", rows)
    with pytest.raises(ConfigError, match=r"data\.image_key is 'images', which .* does not have"):
        check()


def wait_for_ever() -> None:
    time.sleep(3600)


def kill_itself() -> None:
    """As the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.heavy
@pytest.mark.usefixtures("helped")
@pytest.mark.parametrize("failure", [kill_itself, stop_itself, wait_for_ever])
def test_the_rows_of_a_lost_process_are_checked(
    check: Check,
    folder: Path,
    measured: list[str],
    failure: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One that is stopped or hangs is ended after the limit of two seconds."""
    many_rows(folder)
    monkeypatch.setattr(row_check, "LONGEST_SILENCE_SECONDS", 2.0)
    this_process = os.getpid()
    noting = RowReader.measure

    def lost(reader: RowReader, row: Any) -> RowMeasure:
        if row["prompt"] == "<image>row 150" and os.getpid() != this_process:
            failure()
        return noting(reader, row)

    monkeypatch.setattr(RowReader, "measure", lost)
    begin = time.monotonic()
    assert len(check()) == 200
    assert time.monotonic() - begin < 30
    assert "<image>row 150" in measured
    assert "This process checks its rows" in caplog.text
    assert ("the helping processes are ended" in caplog.text) == (failure != kill_itself)


@pytest.mark.heavy
@pytest.mark.usefixtures("helped")
def test_processes_with_slow_rows_go_on(
    check: Check,
    folder: Path,
    measured: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Long videos, say: a row takes 0.2 s, so that 16 rows together take 3.2 s, longer than the limit of 2 s."""
    many_rows(folder, number=32)
    monkeypatch.setattr(row_check, "LONGEST_SILENCE_SECONDS", 2.0)
    original = RowReader.measure

    def slow(reader: RowReader, row: Any) -> RowMeasure:
        time.sleep(0.2)
        return original(reader, row)

    monkeypatch.setattr(RowReader, "measure", slow)
    assert len(check()) == 32
    assert measured == []
    assert "are ended" not in caplog.text


@pytest.mark.heavy
@pytest.mark.usefixtures("helped")
def test_a_result_that_is_written_in_part_is_not_awaited(
    check: Check, folder: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process is killed while it writes a result into the pipe, whose rest would be waited for for ever."""
    many_rows(folder)
    monkeypatch.setattr(row_check, "LONGEST_SILENCE_SECONDS", 2.0)
    this_process = os.getpid()
    original = Connection._send  # pyright: ignore

    def half(self: Any, content: Any, *rest: Any) -> None:
        if os.getpid() != this_process:
            os.write(self.fileno(), bytes(content)[: len(content) // 2])
            kill_itself()
        original(self, content, *rest)

    monkeypatch.setattr(Connection, "_send", half)
    assert len(check()) == 200
    assert len(measured) == 200


@pytest.mark.heavy
def test_row_70_000_is_named(tiny_processing: Processing, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measuring of a row is left out, because 70,000 of them would take a minute."""

    def measure(reader: RowReader, row: Any) -> RowMeasure:
        if row["answer"] == "70000":
            raise DataError("its answer is 70000")
        return RowMeasure(length=1, num_images=0, num_videos=0, visual_tokens=0)

    monkeypatch.setattr(RowReader, "measure", measure)
    rows = Dataset.from_dict({"prompt": ["?"] * 100_000, "answer": [str(row) for row in range(100_000)]})
    config = DataConfig(train_files="rows.jsonl")
    with pytest.raises(DataError, match=r"rows\.jsonl, row 70000: its answer is 70000"):
        ProblemSet("rows.jsonl", config, tiny_processing, rows=rows)


PROGRAM = """
import sys
from cepo.terminal import interrupts
from cepo.config.schema import DataConfig
from cepo.data import row_check
from cepo.data.dataset import ProblemSet
from cepo.models.processing import Processing
row_check.TRIAL_SECONDS = -1.0
row_check._most_processes = lambda: 2
source, model = sys.argv[1:]
with interrupts.handled():
    try:
        rules = DataConfig(train_files=source, max_prompt_length=4096)
        problems = ProblemSet(source, rules, Processing(model))
        print(problems.content())
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        interrupts.exit_process(interrupts.exit_code())
"""


def started(folder: Path, model: Path) -> subprocess.Popen[str]:
    """Starts a check with SIGINT as a terminal leaves it: a shell's background jobs, these tests perhaps, ignore it."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(folder / "train.jsonl"), str(model)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def descendants(root: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{root}/task/{root}/children").read_text().split()]
    processes = list(children)
    for child in children:
        processes += descendants(child)
    return processes


def is_alive(process: int) -> bool:
    """A process that has ended may stay as a zombie, where process 1 does not collect those of dead parents."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_a_run_ends_all_its_processes(folder: Path, tiny_model_folder: Path, number: signal.Signals) -> None:
    """As on a terminal, Ctrl-C goes to the whole group, here while two processes check 200,000 rows."""
    write_lines(folder / "train.jsonl", [{"prompt": f"row {row}", "answer": str(row)} for row in range(200_000)])
    running = started(folder, tiny_model_folder)
    processes: list[int] = []
    until = time.monotonic() + 120
    while len(processes) < 2 and running.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
        processes = descendants(running.pid)
    assert len(processes) >= 2, running.communicate(timeout=60)
    if number == signal.SIGINT:
        os.killpg(running.pid, number)
    else:
        running.kill()
    begin = time.monotonic()
    out, err = running.communicate(timeout=60)
    assert time.monotonic() - begin < 10
    if number == signal.SIGINT:
        assert running.returncode == 130
        assert out == "interrupted\n"
        assert "Traceback" not in err
    while time.monotonic() - begin < 20 and any(is_alive(process) for process in processes):
        time.sleep(0.1)
    assert [process for process in processes if is_alive(process)] == []


@pytest.mark.heavy
def test_two_runs_that_check_the_same_data_agree(folder: Path, tiny_model_folder: Path) -> None:
    many_rows(folder, number=600)
    text = (folder / "train.jsonl").read_text()
    (folder / "train.jsonl").write_text(text.replace('"images": ["', f'"images": ["{folder}/'))
    running = [started(folder, tiny_model_folder) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert outputs[0][0].startswith("600 rows, CRC-32 ")
    assert len(list(cache_folder("checks").glob("*/seal.json"))) == 1
