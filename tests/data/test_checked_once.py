"""Rows are checked once: what is remembered, what makes rows be checked again, and the processes that check them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from generator_cases import picture
from isolation import own_caches

from cepo.config.schema import DataConfig
from cepo.data import cache, check_process, checking, dataset
from cepo.data.check_process import CheckProcess
from cepo.data.dataset import ProblemSet
from cepo.data.measures import RowMeasures, decoded
from cepo.data.row_settings import ProblemRules
from cepo.data.rows import RowMeasure, RowReader
from cepo.errors import ConfigError, DataError
from cepo.models.processing import Processing

Check = Callable[..., ProblemSet]


@pytest.fixture(autouse=True)
def _remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each check is remembered, however fast, and files count as unchanged however young they are."""
    monkeypatch.setattr(dataset, "WORTH_REMEMBERING_SECONDS", -1.0)
    monkeypatch.setattr(cache, "SETTLED_SECONDS", -1.0)
    monkeypatch.setattr(cache, "_has_warned", False)
    monkeypatch.setattr(cache, "SMALLEST_REMEMBERED", 0)
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
    write(tmp_path / "train.jsonl", rows)
    return tmp_path


def write(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def check(folder: Path, tiny_processing: Processing) -> Check:
    def checked(source: str = "", processing: Processing = tiny_processing, **settings: Any) -> ProblemSet:
        usual: dict[str, Any] = {"image_dir": str(folder), "min_pixels": None, "skip_bad_rows": True}
        usual["max_prompt_length"] = 4096
        name = source or str(folder / "train.jsonl")
        rules = ProblemRules.of(DataConfig(train_files=name, **(usual | settings)))
        return ProblemSet(name, rules, processing)

    return checked


ALL = ["<image>a", "<image>b", "c", "<image><image>d"]


def test_a_second_start_measures_no_row(check: Check, measured: list[str], caplog: pytest.LogCaptureFixture) -> None:
    first = check()
    assert measured == ALL
    caplog.clear()
    second = check()
    assert measured == ALL
    for problems in (first, second):
        assert [problem.prompt_id for problem in problems] == ["0", "2", "3"]
        assert problems.skipped == {"bad": 1}
        assert problems.most_visuals == (2, 0)
        assert problems.content() == first.content()
        assert problems.image_probe() == first.image_probe()
    assert "1 bad rows are left out: row 1: column 'answer' is empty" in caplog.text


def test_a_remembered_bad_row_is_an_error_if_it_must_be(check: Check, measured: list[str]) -> None:
    check()
    with pytest.raises(DataError, match="row 1: column 'answer' is empty"):
        check(skip_bad_rows=False)
    assert measured == ALL


def rewritten_with_its_times(file: Path, old: str, new: str) -> None:
    """Changes a file's content; its size and the time of its last change stay."""
    before, content = file.stat(), file.read_text(encoding="utf-8")
    assert len(old) == len(new)
    assert old in content
    file.write_text(content.replace(old, new), encoding="utf-8")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_mtime_ns, file.stat().st_size) == (before.st_mtime_ns, before.st_size)


def test_a_rewrite_with_size_and_time_kept_is_checked(check: Check, folder: Path, measured: list[str]) -> None:
    check()
    rewritten_with_its_times(folder / "train.jsonl", '"answer": "3"', '"answer": "9"')
    check()
    assert len(measured) == 2 * len(ALL)


@pytest.mark.parametrize(
    "change",
    [
        {"min_pixels": 4096},
        {"max_pixels": 2048},
        {"max_prompt_length": 10_000_000},
        {"image_dir": None},
        {"image_hosts": ["pictures.example"]},
        {"answer_key": "images"},
        {"solution_key": "steps"},
        {"video_key": "clips"},
        {"video_fps": 1.0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_setting_that_matters_makes_rows_be_checked(
    check: Check, folder: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    monkeypatch.chdir(folder)
    check()
    check(**change)
    assert len(measured) == 2 * len(ALL)


@pytest.mark.parametrize("change", [{"seed": 7}, {"rollout_batch_size": 7}, {"shuffle": False}])
def test_other_settings_check_no_row_again(check: Check, measured: list[str], change: dict[str, Any]) -> None:
    check()
    check(**change)
    assert measured == ALL


def test_another_longest_prompt_needs_no_new_check(check: Check, measured: list[str]) -> None:
    """The row without an image is the shortest. The limit is applied to what is remembered, as it is to new measures."""
    lengths = check()._measured().lengths
    assert measured == ALL
    shortest = int(lengths[2])
    assert 0 < shortest < min(lengths[0], lengths[3])
    problems = check(max_prompt_length=shortest)
    assert [problem.prompt_id for problem in problems] == ["2"]
    assert problems.skipped == {"bad": 1, "overlong": 2}
    with pytest.raises(
        DataError, match=f"row 0: the prompt has {lengths[0]} tokens .*data.max_prompt_length is {shortest}"
    ):
        check(max_prompt_length=shortest, filter_overlong_prompts=False)
    assert measured == ALL


def test_a_changed_format_prompt_makes_rows_be_checked(check: Check, folder: Path, measured: list[str]) -> None:
    template = folder / "wording.jinja"
    template.write_text("{{ content }} Box it.", encoding="utf-8")
    first = check(format_prompt=str(template))
    rewritten_with_its_times(template, "Box", "Fit")
    check(format_prompt=str(template))
    assert first[0].text == "<image>a Box it."
    assert len(measured) == 2 * len(ALL)


def test_a_slice_and_the_order_of_files_make_a_new_check(check: Check, folder: Path, measured: list[str]) -> None:
    check()
    check(f"{folder}/train.jsonl@train[:3]")
    assert measured == [*ALL, *ALL[:3]]
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    for name, part in {"x": rows[:2], "y": rows[2:]}.items():
        (folder / name).mkdir()
        write(folder / name / "train-0.jsonl", part)
        write(folder / name / "train-1.jsonl", rows[2:] if name == "x" else rows[:2])
    check(str(folder / "x"))
    check(str(folder / "y"))
    assert measured[7:] == [*ALL, *ALL[2:], *ALL[:2]]


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json"])
def test_a_changed_file_of_the_model_makes_rows_be_checked(
    check: Check, tiny_model_folder: Path, tmp_path: Path, measured: list[str], name: str
) -> None:
    model = shutil.copytree(tiny_model_folder, tmp_path / "model")
    files = {file.name for file in model.iterdir()}
    if name not in files:
        name = next(file for file in sorted(files) if "processor" in file or "template" in file)
    check(processing=Processing(str(model)))
    check(processing=Processing(str(model)))
    assert len(measured) == len(ALL)
    file = model / name
    file.write_bytes(file.read_bytes() + b"\n")
    check(processing=Processing(str(model)))
    assert len(measured) == 2 * len(ALL)


def test_a_replaced_image_makes_its_rows_alone_be_checked(check: Check, folder: Path, measured: list[str]) -> None:
    """The image of the first row is one of the last row's too; it becomes four times as large, with its old time."""
    check()
    before = (folder / "0.png").stat()
    picture(9, (128, 128)).save(folder / "new.png")
    os.utime(folder / "new.png", ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(folder / "new.png", folder / "0.png")
    problems = check()
    assert measured == [*ALL, ALL[0], ALL[3]]
    assert problems[0].images[0].size == (128, 128)
    check()
    assert len(measured) == 6


def test_an_image_that_vanishes_and_comes_back_is_seen(check: Check, folder: Path, measured: list[str]) -> None:
    check()
    (folder / "2.png").rename(folder / "away.png")
    for _ in range(2):
        assert [problem.prompt_id for problem in check()] == ["0", "2"]
    (folder / "away.png").rename(folder / "2.png")
    assert [problem.prompt_id for problem in check()] == ["0", "2", "3"]
    assert measured == [*ALL, ALL[3], ALL[3]]


def test_a_failed_download_is_tried_again(check: Check, folder: Path, measured: list[str]) -> None:
    """Nothing answers at port 9 of this machine; the row is bad for as long as that is so and no longer."""
    address = "http://127.0.0.1:9/figure.png"
    write(
        folder / "train.jsonl",
        [{"prompt": "<image>a", "answer": "1", "images": [address]}, {"prompt": "b", "answer": "2"}],
    )
    for _ in range(2):
        assert len(check(image_hosts=["http://127.0.0.1:9"])) == 1
    assert measured == ["<image>a", "b", "<image>a"]


def test_data_that_change_as_they_are_read_are_not_remembered(
    check: Check, folder: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the file is replaced after it was opened, and once while its rows are checked."""
    read_source = dataset.read_source

    def then_replaced(source: str) -> Any:
        rows = read_source(source)
        rewritten_with_its_times(folder / "train.jsonl", '"answer": "3"', '"answer": "9"')
        return rows

    with monkeypatch.context() as patch:
        patch.setattr(dataset, "read_source", then_replaced)
        check()
    assert not (cache.cache_folder() / "checks").exists()
    original = RowReader.measure

    def replacing(reader: RowReader, row: Any) -> RowMeasure:
        if row["prompt"] == "c":
            rewritten_with_its_times(folder / "train.jsonl", '"answer": "9"', '"answer": "7"')
        return original(reader, row)

    with monkeypatch.context() as patch:
        patch.setattr(RowReader, "measure", replacing)
        check()
    assert not (cache.cache_folder() / "checks").exists()
    assert check()[1].ground_truth == "7"
    assert len(measured) == 3 * len(ALL)


def test_an_image_of_the_future_is_remembered(check: Check, folder: Path, measured: list[str]) -> None:
    """Its time is another clock's, or made up; that of its entry is the file system's."""
    future = time.time() + 1e8
    os.utime(folder / "0.png", (future, future))
    check()
    check()
    assert measured == ALL


@pytest.mark.parametrize("damage", ["truncated", "of other data", "foreign"])
def test_a_damaged_entry_is_checked_anew(check: Check, measured: list[str], damage: str) -> None:
    check()
    (entry,) = (cache.cache_folder() / "checks").iterdir()
    if damage == "truncated":
        entry.write_bytes(entry.read_bytes()[:-20])
    else:
        contents = {"of other data": RowMeasures(3).encoded(), "foreign": b"PK\x03\x04 no archive"}
        cache.write_entry("checks", entry.name, contents[damage])
    assert len(check()) == 3
    assert len(measured) == 2 * len(ALL)
    check()
    assert len(measured) == 2 * len(ALL)


def test_without_a_cache_each_start_checks_the_rows(
    check: Check, folder: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "train.jsonl"))
    assert [len(check()), len(check())] == [3, 3]
    assert len(measured) == 2 * len(ALL)
    assert caplog.text.count("the cache folder cannot be used") == 1


def test_measures_come_back_from_bytes_as_they_were(check: Check, folder: Path) -> None:
    check()
    (entry,) = (cache.cache_folder() / "checks").iterdir()
    content = cache.read_entry("checks", entry.name)
    assert content is not None
    measures = decoded(content, 4)
    assert measures.reasons == {1: "column 'answer' is empty; a problem without an answer cannot be rewarded"}
    assert measures.num_images.tolist() == [1, 0, 0, 2]
    assert measures.stale_rows() == []
    assert measures.encoded() == content
    (folder / "1.png").unlink()
    assert measures.stale_rows() == []  # row 1 is bad before its image is opened


@pytest.fixture
def helped(monkeypatch: pytest.MonkeyPatch) -> list[CheckProcess]:
    """One more process checks rows from the first on, and this one waits after its first chunk until that is ready."""
    processes: list[CheckProcess] = []
    is_ready = threading.Event()
    wait_until_ready, check_here = CheckProcess.wait_until_ready, checking._checked_here
    chunks_here: list[int] = []

    def noted(process: CheckProcess) -> None:
        processes.append(process)
        wait_until_ready(process)
        is_ready.set()

    def waiting(reader: RowReader, rows: Any) -> Any:
        chunks_here.append(len(rows))
        if len(chunks_here) > 2:
            assert is_ready.wait(60)
            time.sleep(0.02)
        return check_here(reader, rows)

    monkeypatch.setattr(CheckProcess, "wait_until_ready", noted)
    monkeypatch.setattr(checking, "_checked_here", waiting)
    monkeypatch.setattr(checking, "TRIAL_SECONDS", -1.0)
    monkeypatch.setattr(checking, "num_helpers", lambda remaining: 1)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    monkeypatch.setattr(checking, "_MOST_ROWS_TOGETHER", 4)
    return processes


def many_rows(folder: Path, number: int = 200, bad: Sequence[int] = ()) -> None:
    rows = [
        {"prompt": f"<image>row {row}", "answer": "" if row in bad else str(row), "images": [f"{row % 3}.png"]}
        for row in range(number)
    ]
    write(folder / "train.jsonl", rows)


def ended(processes: Sequence[CheckProcess]) -> bool:
    return len(processes) == 1 and all(process.process.poll() is not None for process in processes)


@pytest.mark.heavy
def test_two_processes_find_what_one_finds(
    check: Check, folder: Path, measured: list[str], helped: list[CheckProcess], caplog: pytest.LogCaptureFixture
) -> None:
    """Of 200 rows, two are bad; the other process checks some of them and says what it would have logged."""
    many_rows(folder, bad=(150, 190))
    problems = check()
    assert 0 < len(measured) < 200
    assert ended(helped)
    assert problems.skipped == {"bad": 2}
    assert [problem.prompt_id for problem in problems] == [str(row) for row in range(200) if row not in (150, 190)]
    left_out = [record.message for record in caplog.records if "is left out: " in record.message]
    assert [message.split(": column")[0].rsplit("row ")[1] for message in left_out] == [
        "150 is left out",
        "190 is left out",
    ]
    again = check()
    assert again.content() == problems.content()
    assert len(measured) < 200


@pytest.mark.heavy
def test_the_first_bad_row_is_named_whoever_checks_it(check: Check, folder: Path, helped: list[CheckProcess]) -> None:
    many_rows(folder, bad=(120, 121, 122, 123, 124, 125, 160, 199))
    with pytest.raises(DataError, match=r"train\.jsonl, row 120: column 'answer' is empty"):
        check(skip_bad_rows=False)
    assert ended(helped)
    assert not (cache.cache_folder() / "checks").exists()


@pytest.mark.heavy
def test_a_setting_at_fault_is_an_error_in_any_process(
    check: Check, folder: Path, helped: list[CheckProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 150 is the first with a mark for an image, and the column of images does not exist."""
    rows = [{"prompt": f"{'<image>' if row >= 150 else ''}row {row}", "answer": "1"} for row in range(200)]
    write(folder / "train.jsonl", rows)
    with pytest.raises(ConfigError, match=r"data\.image_key is 'images', which .* does not have"):
        check()
    assert ended(helped)


@pytest.mark.heavy
def test_the_rows_of_a_killed_process_are_checked_here(
    check: Check,
    folder: Path,
    helped: list[CheckProcess],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is killed with a chunk in its hands, as the kernel does when memory runs out."""
    many_rows(folder)
    received = CheckProcess.received

    def killed(process: CheckProcess) -> Any:
        os.kill(process.process.pid, signal.SIGKILL)
        return received(process)

    monkeypatch.setattr(CheckProcess, "received", killed)
    assert len(check()) == 200
    assert ended(helped)
    assert "a process that checks rows ended with signal 9" in caplog.text


def test_a_process_that_cannot_start_costs_only_its_help(
    check: Check, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    many_rows(folder)
    monkeypatch.setattr(check_process.sys, "executable", "/bin/false")
    monkeypatch.setattr(checking, "TRIAL_SECONDS", -1.0)
    monkeypatch.setattr(checking, "num_helpers", lambda remaining: 1)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    assert len(check()) == 200


def test_others_help_only_with_more_than_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 4 processors 3 others help; on 64 at most 15, and 2 with 20 s of work."""
    monkeypatch.setattr(checking, "num_processors", lambda: 4)
    assert [checking.num_helpers(seconds) for seconds in (0.0, 9.9, 10.0, 300.0)] == [0, 0, 1, 3]
    monkeypatch.setattr(checking, "num_processors", lambda: 64)
    assert [checking.num_helpers(seconds) for seconds in (20.0, 3000.0)] == [2, 15]


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
        ProblemSet("rows.jsonl", ProblemRules.of(config), tiny_processing, rows=rows)


PROGRAM = """
import os, sys
from cepo.terminal import interrupts
from cepo.config.schema import DataConfig
from cepo.data import checking
from cepo.data.dataset import ProblemSet
from cepo.data.row_settings import ProblemRules
from cepo.models.processing import Processing
checking.TRIAL_SECONDS = -1.0
checking.num_helpers = lambda remaining: 1
source, model = sys.argv[1:]
with interrupts.handled():
    try:
        rules = ProblemRules.of(DataConfig(train_files=source, max_prompt_length=4096))
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
    return [*children, *(inner for child in children for inner in descendants(child))]


def is_alive(process: int) -> bool:
    """A process that has ended may stay as a zombie, where process 1 does not collect those of dead parents."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.heavy
def test_ctrl_c_ends_a_check_and_all_its_processes(folder: Path, tiny_model_folder: Path) -> None:
    """As on a terminal, the signal goes to the whole process group, here while two processes check 200,000 rows."""
    rows = [{"prompt": f"row {row}", "answer": str(row)} for row in range(200_000)]
    write(folder / "train.jsonl", rows)
    running = started(folder, tiny_model_folder)
    processes: list[int] = []
    until = time.monotonic() + 120
    while (
        len(processes) < 3 and running.poll() is None and time.monotonic() < until
    ):  # two renderers and the other process
        time.sleep(0.1)
        processes = descendants(running.pid)
    assert len(processes) == 3, running.communicate(timeout=60)
    os.killpg(running.pid, signal.SIGINT)
    begin = time.monotonic()
    out, err = running.communicate(timeout=60)
    assert time.monotonic() - begin < 5
    assert (running.returncode, out) == (130, "interrupted\n")
    assert "Traceback" not in err
    time.sleep(1)
    assert [process for process in processes if is_alive(process)] == []


@pytest.mark.heavy
def test_two_runs_that_check_the_same_data_agree(folder: Path, tiny_model_folder: Path) -> None:
    many_rows(folder, number=600)
    (folder / "train.jsonl").write_text(
        (folder / "train.jsonl").read_text().replace('"images": ["', f'"images": ["{folder}/')
    )
    running = [started(folder, tiny_model_folder) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert outputs[0][0].startswith("600 rows, CRC-32 ")
    assert len(list((cache.cache_folder() / "checks").iterdir())) == 1
