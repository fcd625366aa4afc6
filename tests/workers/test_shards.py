"""No file of a checkpoint runs code of whoever wrote it."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from cepo.errors import CheckpointError
from cepo.workers.shards import METADATA, ShardReader, load_shards, read_saved

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Payload:
    """Makes a folder where it is unpickled with all names allowed."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def state() -> dict[str, Any]:
    """What a trained state is made of: weights in several types, and optimizer settings that are no tensors."""
    generator = torch.Generator().manual_seed(1)
    weights = {f"w{index}": torch.randn(3, 4 + index, generator=generator).to(dtype) for index, dtype in enumerate(
        (torch.float32, torch.bfloat16, torch.float16, torch.float64))}  # fmt: skip
    groups = [{"lr": 1e-6, "betas": (0.9, 0.999), "fused": None, "amsgrad": False, "params": ["w0", "w1"]}]
    return {"model": weights, "optimizer": {"state": {"w0": {"step": torch.tensor(3.0)}}, "param_groups": groups}}


def saved(folder: Path, content: dict[str, Any]) -> Path:
    dcp.save(content, checkpoint_id=str(folder), no_dist=True)
    return folder


def rewrite(folder: Path, change: Callable[[Any], None]) -> None:
    """Changes what the metadata states, with the real classes."""
    metadata = pickle.loads((folder / METADATA).read_bytes())
    change(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


def test_shards_come_back_bit_for_bit_with_other_values(tmp_path: Path) -> None:
    folder = saved(tmp_path / "shards", state())
    loaded = state()
    for tensor in loaded["model"].values():
        tensor.zero_()
    loaded["optimizer"]["param_groups"][0].update(lr=0.0, betas=(0.0, 0.0), amsgrad=True)
    load_shards(loaded, folder, no_dist=True)
    for name, tensor in state()["model"].items():
        assert torch.equal(loaded["model"][name], tensor), name
    assert loaded["optimizer"]["param_groups"] == state()["optimizer"]["param_groups"]


def test_metadata_that_asks_for_code_is_refused_by_name(tmp_path: Path) -> None:
    folder = saved(tmp_path / "shards", state())
    trace = tmp_path / "it_ran"
    metadata = pickle.loads((folder / METADATA).read_bytes())
    metadata.planner_data["x"] = Payload(trace)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    for read in (lambda: ShardReader(folder).read_metadata(), lambda: load_shards(state(), folder, no_dist=True)):
        with pytest.raises(
            CheckpointError,
            match=rf"{METADATA} is damaged, or asks for code .*'\w+\.mkdir'",
        ):
            read()
    assert not trace.exists()
    pickle.loads((folder / METADATA).read_bytes())
    assert trace.exists(), "the payload is one"


def test_a_shards_entry_that_asks_for_code_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "it_ran"
    hostile = state()
    hostile["optimizer"]["param_groups"][0]["lr"] = Payload(trace)
    folder = saved(tmp_path / "shards", hostile)
    with pytest.raises(CheckpointError, match=r"shards is damaged, or asks for code"):
        load_shards(state(), folder, no_dist=True)
    assert not trace.exists()


def test_a_random_state_that_asks_for_code_is_refused(tmp_path: Path) -> None:
    trace, file = tmp_path / "it_ran", tmp_path / "random_state.pt"
    torch.save({"torch": torch.get_rng_state(), "python": Payload(trace), "cuda": []}, file)
    with pytest.raises(CheckpointError, match=r"random_state\.pt is damaged, or asks for code"):
        read_saved(file)
    assert not trace.exists()


def test_a_random_state_comes_back_as_it_was(tmp_path: Path) -> None:
    content = {"torch": torch.get_rng_state(), "python": random.getstate(), "cuda": []}
    torch.save(content, tmp_path / "random_state.pt")
    loaded = read_saved(tmp_path / "random_state.pt")
    assert torch.equal(loaded["torch"], content["torch"])
    assert loaded["python"] == content["python"]


@pytest.mark.parametrize("name", ["../elsewhere", "/dev/zero", "absent.distcp", "pipe", "..", "", "link"])
def test_a_shard_outside_its_folder_or_no_file_is_refused(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path / "shards", state())
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to(folder / "__0_0.distcp")
    (tmp_path / "elsewhere").touch()

    def rename(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = name

    rewrite(folder, rename)
    with pytest.raises(CheckpointError, match=rf"names the shard '{name}', which is not a file in its folder"):
        load_shards(state(), folder, no_dist=True)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "text": lambda content: b"no pickle at all",
    "list": lambda content: pickle.dumps([1, 2]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_one_message_with_their_name(tmp_path: Path, damage: str) -> None:
    folder, file = saved(tmp_path / "shards", state()), tmp_path / "random_state.pt"
    torch.save({"torch": torch.get_rng_state()}, file)
    for path in (folder / METADATA, file):
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(CheckpointError, match=METADATA):
        load_shards(state(), folder, no_dist=True)
    with pytest.raises(CheckpointError, match=r"random_state\.pt"):
        read_saved(file)


def test_a_tensor_that_is_stored_as_a_value_is_refused(tmp_path: Path) -> None:
    """The value would take the tensor's place in the state, and the model would keep its own weights."""
    folder = saved(tmp_path / "shards", state() | {"model": {"w0": 0.5}})
    with pytest.raises(dcp.CheckpointException, match=r"the tensor 'model\.w0' is stored as another value"):
        load_shards({"model": {"w0": torch.ones(2)}}, folder, no_dist=True)


def test_metadata_cannot_change_the_class_of_paths(tmp_path: Path) -> None:
    """The opcode BUILD, applied to that class, would give every path of this process the text of the attacker."""
    folder = saved(tmp_path / "shards", state())
    metadata = pickle.loads((folder / METADATA).read_bytes())
    change = b"cpathlib\nPosixPath\n" + pickle.dumps((None, {"_str": str(tmp_path)}), 2)[2:-1] + b"b0"
    (folder / METADATA).write_bytes(b"\x80\x02" + change + pickle.dumps(metadata, 2)[2:])
    load_shards(state(), folder, no_dist=True)
    assert str(Path("/somewhere/else")) == "/somewhere/else"


def test_a_great_sparse_file_is_not_read(tmp_path: Path) -> None:
    folder, file = saved(tmp_path / "shards", state()), tmp_path / "random_state.pt"
    for path in (folder / METADATA, file):
        path.touch()
        os.truncate(path, 1 << 40)
    with pytest.raises(CheckpointError, match="at most"):
        ShardReader(folder)
    with pytest.raises(CheckpointError, match="at most"):
        read_saved(file)


EDITS = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 3), st.binary(min_size=1, max_size=6)), min_size=1, max_size=4
)  # fmt: skip


def edited(content: bytes, edits: list[tuple[float, int, bytes]]) -> bytes:
    """Replaces bytes at relative places; an edit of 0 bytes inserts."""
    for place, length, new in edits:
        start = int(place * len(content))
        content = content[:start] + new + content[start + length :]
    return content


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = saved(tmp_path_factory.mktemp("fuzz") / "shards", state())
    torch.save({"torch": torch.get_rng_state(), "python": random.getstate()}, folder / "random_state.pt")
    return folder


@given(edits=EDITS, file=st.sampled_from([METADATA, "__0_0.distcp", "random_state.pt"]))
def test_edited_files_are_read_or_refused_with_one_message(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[float, int, bytes]], file: str
) -> None:
    folder = tmp_path_factory.mktemp("edited") / "shards"
    shutil.copytree(whole, folder)
    (folder / file).write_bytes(edited((folder / file).read_bytes(), edits))
    with contextlib.suppress(CheckpointError, dcp.CheckpointException):  # the latter where other entries are described
        load_shards(state(), folder, no_dist=True)
    with contextlib.suppress(CheckpointError):
        read_saved(folder / "random_state.pt")
