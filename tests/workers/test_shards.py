"""No file of a checkpoint runs code of whoever wrote it."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

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


def test_shards_come_back_bit_for_bit_with_other_values(tmp_path: Path) -> None:
    """The other values are no tensors."""
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
    """It runs nothing."""
    folder = saved(tmp_path / "shards", state())
    trace = tmp_path / "it_ran"
    metadata = pickle.loads((folder / METADATA).read_bytes())
    metadata.planner_data["x"] = Payload(trace)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    for read in (lambda: ShardReader(folder).read_metadata(), lambda: load_shards(state(), folder, no_dist=True)):
        with pytest.raises(CheckpointError, match=rf"{METADATA} is refused, because it asks for \w+\.mkdir"):
            read()
    assert not trace.exists()
    pickle.loads((folder / METADATA).read_bytes())
    assert trace.exists(), "the payload is one"


def test_a_shards_entry_that_asks_for_code_is_refused(tmp_path: Path) -> None:
    """It is refused by name and runs nothing."""
    trace = tmp_path / "it_ran"
    hostile = state()
    hostile["optimizer"]["param_groups"][0]["lr"] = Payload(trace)
    folder = saved(tmp_path / "shards", hostile)
    with pytest.raises(CheckpointError, match=r"param_groups.*shards is refused, because it asks for \w+\.mkdir"):
        load_shards(state(), folder, no_dist=True)
    assert not trace.exists()


def test_a_random_state_that_asks_for_code_is_refused(tmp_path: Path) -> None:
    """It is refused by name and runs nothing."""
    trace, file = tmp_path / "it_ran", tmp_path / "random_state.pt"
    torch.save({"torch": torch.get_rng_state(), "python": Payload(trace), "cuda": []}, file)
    with pytest.raises(CheckpointError, match=r"random_state\.pt is refused, because it asks for \w+\.mkdir"):
        read_saved(file)
    assert not trace.exists()


def test_a_random_state_comes_back_as_it_was(tmp_path: Path) -> None:
    content = {"torch": torch.get_rng_state(), "python": random.getstate(), "cuda": []}
    torch.save(content, tmp_path / "random_state.pt")
    loaded = read_saved(tmp_path / "random_state.pt")
    assert torch.equal(loaded["torch"], content["torch"])
    assert loaded["python"] == content["python"]


@pytest.mark.parametrize("name", ["../elsewhere", "/dev/zero", "absent.distcp", "pipe"])
def test_a_shard_outside_its_folder_or_no_file_is_refused(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path / "shards", state())
    os.mkfifo(folder / "pipe")
    (tmp_path / "elsewhere").touch()
    metadata = pickle.loads((folder / METADATA).read_bytes())
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = type(info)(name, info.offset, info.length)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
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
