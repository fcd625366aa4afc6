"""No file of a checkpoint is more than numbers, and none passes for one with all its values."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from actors import differing
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from cepo.errors import CheckpointError
from cepo.workers.checkpoint import Shards, load_shards, write_shards

pytestmark = pytest.mark.usefixtures("one_rank")

FILE = "rank_0_of_1.safetensors"


def state() -> dict[str, Tensor]:
    """What a trained state is made of: weights in several types, moments and a count of steps."""
    generator = torch.Generator().manual_seed(1)
    types = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    weights = {f"model.w{n}": torch.randn(3, 4 + n, generator=generator).to(kind) for n, kind in enumerate(types)}
    return {**weights, "optimizer.w0.exp_avg": torch.ones(3, 4), "optimizer.w0.step": torch.tensor(3.0)}


def saved(folder: Path) -> Path:
    write_shards(state(), folder, {"random": [1, None]})
    return folder


def parts(folder: Path, *rows: tuple[int, int], total: int = 3) -> None:
    """Replaces the one file by one for each (first row, number of rows) of w0, which has `total` rows."""
    (folder / FILE).unlink()
    for rank, (first, number) in enumerate(rows):
        described = {"rows": json.dumps({"model.w0": [first, total]}), "notes": "{}"}
        values = torch.arange(first, first + number).repeat(4, 1).T.float().contiguous()
        save_file({"model.w0": values}, folder / f"rank_{rank}_of_{len(rows)}.safetensors", described)


@pytest.mark.parametrize("kind", ["", "model."])
def test_shards_come_back_bit_for_bit_with_their_notes(tmp_path: Path, kind: str) -> None:
    """The weights also alone, beside a foreign optimizer."""
    expected = {name: tensor for name, tensor in state().items() if name.startswith(kind)}
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    assert load_shards(loaded, saved(tmp_path / "shards")).notes == [{"random": [1, None]}]
    assert differing(loaded, expected) == []


@pytest.mark.parametrize("rows", [[(0, 3)], [(0, 1), (1, 2)], [(2, 1), (0, 2)], [(0, 3), (3, 0)]], ids=str)
def test_rows_that_cover_a_tensor_are_accepted_in_any_order(tmp_path: Path, rows: list[tuple[int, int]]) -> None:
    parts(saved(tmp_path), *rows)
    loaded = {"model.w0": torch.zeros(3, 4)}
    load_shards(loaded, tmp_path)
    assert loaded["model.w0"][:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "rows",
    [[], [(0, 1), (2, 1)], [(0, 2), (1, 2)], [(0, 1), (0, 1), (1, 2)], [(0, 2)], [(0, 4)], [(-1, 4)], [(1, 2)]],
    ids=str,
)
def test_rows_with_gaps_or_twice_are_refused(tmp_path: Path, rows: list[tuple[int, int]]) -> None:
    parts(saved(tmp_path), *rows)
    with pytest.raises(CheckpointError, match=r"does not have every row of 'model\.w0' once|cannot be read"):
        Shards(tmp_path)


def described(rows: object, notes: object = None) -> Callable[[Path], None]:
    """Replaces what the header states of the rows and notes."""

    def change(folder: Path) -> None:
        with safe_open(folder / FILE, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        texts = {"rows": json.dumps(rows), "notes": json.dumps(notes or {})}
        save_file(tensors, folder / FILE, texts if rows is not None else None)

    return change


def bytes_of(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / FILE).write_bytes(change((folder / FILE).read_bytes()))


WHOLE = {name: [0, 3] for name in state()} | {"optimizer.w0.step": [0, 1]}
GAMES: dict[str, Callable[[Path], object]] = {
    "empty": bytes_of(lambda content: b""),
    "half": bytes_of(lambda content: content[: len(content) // 2]),
    "one byte less": bytes_of(lambda content: content[:-1]),
    "one byte more": bytes_of(lambda content: content + b"x"),
    "text": bytes_of(lambda content: b"no tensors at all"),
    "a header without end": bytes_of(lambda content: b"\xff" * 8 + content[8:]),
    "more rows than values": bytes_of(lambda content: content.replace(b'"shape": [3, 4]', b'"shape": [9, 4]')),
    "huge": bytes_of(lambda content: content.replace(b'"shape": [3, 4]', b'"shape": [1e9]')),
    "no description": described(None),
    "rows of no tensor": described({}),
    "rows as text": described(WHOLE | {"model.w0": ["0", "3"]}),
    "rows as truth values": described(WHOLE | {"model.w0": [False, 3]}),
    "rows as a list": described([1, 2]),
    "deep rows": bytes_of(lambda content: content.replace(b'"rows": "{', b'"rows": "' + b"[" * 100_000)),
    "notes as a number": described(WHOLE, 7),
    "a file more": lambda folder: (folder / "rank_1_of_2.safetensors").touch(),
    "another name": lambda folder: (folder / FILE).rename(folder / "rank_0_of_2.safetensors"),
    "no file": lambda folder: (folder / FILE).unlink(),
    "no folder": lambda folder: shutil.rmtree(folder),
    "a folder": lambda folder: ((folder / FILE).unlink(), (folder / FILE).mkdir()),
    "a pipe": lambda folder: ((folder / FILE).unlink(), os.mkfifo(folder / FILE)),
    "a link out": lambda folder: (
        (folder / FILE).rename(folder.parent / "elsewhere"),
        (folder / FILE).symlink_to(folder.parent / "elsewhere"),
    ),
    "the format of 0.4.0": lambda folder: (folder / ".metadata").touch(),
    "sparse": lambda folder: os.truncate(folder / FILE, 1 << 40),
}


@pytest.mark.parametrize("game", GAMES)
def test_damaged_and_hostile_files_are_one_message(tmp_path: Path, game: str) -> None:
    folder = saved(tmp_path / "shards")
    GAMES[game](folder)
    with pytest.raises(CheckpointError, match=r"shards.* (cannot be read|merge it with the version that wrote it)"):
        load_shards(state(), folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.w0": torch.zeros(3, 5)}, r"'model\.w0' with the shape \(3, 4\), here \(3, 5\)"),
        ({"model.w0": torch.zeros(12)}, r"'model\.w0' with the shape \(3, 4\), here \(12,\)"),
        ({"model.w9": torch.zeros(2)}, r"'model\.w9' with the shape None, here \(2,\)"),
        ({"model.w0": None}, r"'model\.w0' with the shape \(3, 4\), here None"),
        ({"teacher.w0": torch.zeros(2)}, r"'teacher\.w0' with the shape None"),
    ],
)
def test_tensors_of_another_model_are_refused(tmp_path: Path, change: dict[str, Tensor | None], words: str) -> None:
    """Also where the checkpoint has more, because a part of a model would keep its own weights."""
    model_tensors = {name: tensor for name, tensor in (state() | change).items() if tensor is not None}
    with pytest.raises(CheckpointError, match=f"cannot be restored into this model: 1 tensors differ, such as {words}"):
        load_shards(model_tensors, saved(tmp_path))


EDITS = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 3), st.binary(min_size=1, max_size=6)), min_size=1, max_size=4
)  # fmt: skip


@given(edits=EDITS, in_header=st.booleans())
def test_edited_files_are_read_or_refused_with_one_message(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[float, int, bytes]], in_header: bool
) -> None:
    """An edit replaces bytes at a relative place; one of 0 bytes inserts."""
    folder = saved(tmp_path_factory.mktemp("edited") / "shards")
    content = (folder / FILE).read_bytes()
    for place, length, new in edits:
        start = int(place * (900 if in_header else len(content)))
        content = content[:start] + new + content[start + length :]
    (folder / FILE).write_bytes(content)
    with contextlib.suppress(CheckpointError):
        load_shards(state(), folder)
