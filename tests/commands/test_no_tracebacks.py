"""Odd settings, records and checkpoints end in one message, and odd text in tokens."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cepo.data.prompts import sanitise_reference
from cepo.errors import CheckpointError, DataError
from cepo.run_folder.environment import read_environment
from cepo.run_folder.layout import FILES_FILE, STATE_FILE
from cepo.run_folder.sinks.base import RunDescription
from cepo.run_folder.sinks.tracker import build_tracker
from cepo.trainer.checkpoints import CheckpointStore, TrainerState, damaged_file, written_files


def test_a_checkpoint_without_room_names_the_free_space(tmp_path: Path) -> None:
    class FullDisk:
        def save(self, folder: Path) -> None:
            raise OSError(28, "No space left on device")

    store = CheckpointStore(tmp_path, keep=1, identity={})
    with pytest.raises(CheckpointError, match=r"written to .* \(\d+\.\d GB are free there\): .*No space left"):
        store.save(TrainerState(step=1), FullDisk())  # type: ignore[arg-type]


def checkpoint(folder: Path, **state: object) -> Path:
    (folder / "actor").mkdir(parents=True)
    (folder / "actor" / "weights").write_text("abc")
    (folder / STATE_FILE).write_text(json.dumps({"format": 2, "state": {"step": 1}, **state}))
    (folder / FILES_FILE).write_text(json.dumps(written_files(folder)))
    return folder


def listed(name: str) -> Callable[[Path], object]:
    """Lists a file that is not the checkpoint's own as one that was written."""

    def apply(folder: Path) -> None:
        files = json.loads((folder / FILES_FILE).read_text())
        (folder / FILES_FILE).write_text(json.dumps(files | {name.format(folder=folder): files["actor/weights"]}))

    return apply


def added(name: str) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()

    return apply


def replaced(name: str, *, by_link: bool) -> Callable[[Path], object]:
    """Puts a link or a pipe in a file's place; opening a pipe would wait for ever."""

    def apply(folder: Path) -> None:
        path = (folder / name).rename(folder.parent / "outside")
        (folder / name).symlink_to(path) if by_link else os.mkfifo(folder / name)

    return apply


ODD = ["[]", "{}", '{"a": ["x", 1]}', "\x00"]
FOREIGN = ("../outside", "{folder}/../outside", "actor", "/dev/zero")
DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    *((lambda folder, text=text: (folder / FILES_FILE).write_text(text), FILES_FILE) for text in ODD),
    (lambda folder: (folder / FILES_FILE).unlink(), f"{FILES_FILE} does not exist"),
    *((added(name), f"{name} is not listed in {FILES_FILE}") for name in ("more", "actor/.hidden", "actor/deep/more")),
    *((listed(name), "is missing, 3 were written") for name in FOREIGN),
    *(
        (replaced(name, by_link=by_link), f"{name} is not a regular file")
        for name in ("actor/weights", STATE_FILE, FILES_FILE)
        for by_link in (True, False)
    ),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE, ids=range(len(DAMAGE)))
def test_a_damaged_checkpoint_is_named_and_not_read(
    tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    folder = checkpoint(tmp_path / "global_step_1")
    assert damaged_file(folder) is None
    damage(folder)
    assert words in str(damaged_file(folder))
    store = CheckpointStore(tmp_path, keep=-1, identity={})
    with pytest.raises(CheckpointError, match=re.escape(words)):
        store.read(folder)
    assert store.find_last() is None


def test_a_files_checksum_is_crc_32_as_in_other_programs(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"123456789")
    ((size, checksum),) = written_files(tmp_path).values()
    assert (size, checksum) == (9, 0xCBF43926), "the published check value"


@pytest.mark.parametrize("version", [1, 3, "x", None])
def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path, version: object) -> None:
    folder = checkpoint(tmp_path / "global_step_1", format=version)
    with pytest.raises(CheckpointError, match=r"has format .* reads format 2; use the version that wrote it"):
        CheckpointStore(tmp_path, keep=-1, identity={}).read(folder)


COUNTS: list[dict[str, object]] = [
    {"step": "2"}, {"step": -1}, {"rounds": None}, {"kl_coefficient": float("inf")},
]  # fmt: skip


@pytest.mark.parametrize("change", COUNTS, ids=str)
def test_a_state_without_counts_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    counts = {"step": 1, "rounds": 1, "kl_coefficient": 0.1}
    checkpoint(tmp_path / "sound", state=counts)
    CheckpointStore(tmp_path, keep=-1, identity={}).read(tmp_path / "sound")
    checkpoint(tmp_path / "odd", state=counts | change)
    with pytest.raises(CheckpointError, match="has no valid trainer state"):
        CheckpointStore(tmp_path, keep=-1, identity={}).read(tmp_path / "odd")


def resumed(folder: Path) -> None:
    run = RunDescription(folder=folder, config_text="a: 1\n", max_steps=5, resumed_step=2)
    build_tracker(["file"], run).close()


@pytest.mark.parametrize("content", ["", "{}"])
def test_a_damaged_environment_is_named_with_its_remedy(tmp_path: Path, content: str) -> None:
    (tmp_path / "environment.json").write_text(content)
    for read_function in (read_environment, resumed):
        with pytest.raises(DataError, match=r"environment\.json is damaged; remove it to go on"):
            read_function(tmp_path)


@pytest.mark.parametrize("row", ["{}", '{"step": "x"}'])
def test_a_row_without_a_step_is_named_on_resume(tmp_path: Path, row: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{row}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl: a row has no 'step'.*Remove that line"):
        resumed(tmp_path)


@pytest.mark.parametrize(
    "character",
    ["\u2060", "\u2066", "\u2069", "\u00ad", "\U000e0041", "\u061c", "\u180e", "\ufffb", "\udfff"],
)
def test_invisible_characters_leave_a_reference(character: str) -> None:
    assert sanitise_reference(f"1{character}2", []) == "12"
    assert sanitise_reference(f"<{character}x>", ["<x>"]) == ""


def test_a_lone_surrogate_is_encoded_as_a_question_mark() -> None:
    from cepo.microgeo.world import ASSETS
    from cepo.models.processing import Processing

    processing = Processing(str(ASSETS))
    for text in ("\ud800", "a\udfffb", "\ud83d"):
        plain = "".join("?" if "\ud800" <= character <= "\udfff" else character for character in text)
        assert processing.encode_text(text) == processing.encode_text(plain) != []
    assert (
        processing.encode_text("\U0001f600 é")
        == processing.tokenizer("\U0001f600 é", add_special_tokens=False)["input_ids"]
    )
