"""No file of a checkpoint runs code of whoever wrote it, changes this process, or passes for one with all its values."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import pickle
import random
import shutil
import zipfile
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
        with pytest.raises(CheckpointError, match=rf"{METADATA} is refused, because it asks for \w+\.mkdir"):
            read()
    assert not trace.exists()
    pickle.loads((folder / METADATA).read_bytes())
    assert trace.exists(), "the payload is one"


def test_a_shards_entry_that_asks_for_code_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "it_ran"
    hostile = state()
    hostile["optimizer"]["param_groups"][0]["lr"] = Payload(trace)
    folder = saved(tmp_path / "shards", hostile)
    with pytest.raises(CheckpointError, match=r"param_groups.*shards is refused, because it asks for \w+\.mkdir"):
        load_shards(state(), folder, no_dist=True)
    assert not trace.exists()


def test_a_random_state_that_asks_for_code_is_refused(tmp_path: Path) -> None:
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


def test_metadata_that_changes_a_class_is_refused(tmp_path: Path) -> None:
    """The opcode BUILD, applied to a class, would give every path of this process the text of the attacker."""
    folder = saved(tmp_path / "shards", state())
    metadata = pickle.loads((folder / METADATA).read_bytes())
    change = b"cpathlib\nPosixPath\n" + pickle.dumps((None, {"_str": str(tmp_path)}), 2)[2:-1] + b"b0"
    (folder / METADATA).write_bytes(b"\x80\x02" + change + pickle.dumps(metadata, 2)[2:])
    try:
        with pytest.raises(CheckpointError, match=rf"{METADATA} is refused, because it changes pathlib\.PosixPath"):
            load_shards(state(), folder, no_dist=True)
        assert str(Path("/somewhere/else")) == "/somewhere/else"
    finally:
        if isinstance(vars(pathlib.PosixPath).get("_str"), str):
            del pathlib.PosixPath._str


def chunks_of(metadata: Any, name: str = "model.w0") -> list[Any]:
    return metadata.state_dict_metadata[name].chunks


def place_of(metadata: Any, name: str = "model.w0") -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def sizes(*numbers: Any) -> torch.Size:
    return torch.Size(numbers)


def halves(metadata: Any, *parts: tuple[int, int]) -> None:
    """Cuts w0, of 3 rows, into chunks of the given first row and number of rows, all stored."""
    (index,) = (index for index in metadata.storage_data if index.fqn == "model.w0")
    info = metadata.storage_data.pop(index)
    chunk = chunks_of(metadata).pop()
    for start, rows in parts:
        chunks_of(metadata).append(type(chunk)(sizes(start, 0), sizes(rows, 4)))
        metadata.storage_data[type(index)("model.w0", sizes(start, 0))] = info


def drop(metadata: Any, name: str, *, chunks: bool) -> None:
    """Leaves out where an entry is stored and, with `chunks`, the chunks too."""
    for index in [index for index in metadata.storage_data if index.fqn == name]:
        del metadata.storage_data[index]
    if chunks:
        chunks_of(metadata, name).clear()


GAMES: dict[str, Callable[[Any], Any]] = {
    "no chunks": lambda it: drop(it, "model.w0", chunks=True),
    "no storage": lambda it: drop(it, "model.w0", chunks=False),
    "no storage of a value": lambda it: drop(it, "optimizer.param_groups.0.lr", chunks=False),
    "gap": lambda it: halves(it, (0, 1), (2, 1)),
    "overlap": lambda it: halves(it, (0, 2), (1, 2)),
    "a part twice": lambda it: halves(it, (0, 1), (0, 1), (2, 1)),
    "end missing": lambda it: halves(it, (0, 2)),
    "beyond the end": lambda it: halves(it, (0, 4)),
    "negative offset": lambda it: halves(it, (-1, 4)),
    "columns missing": lambda it: setattr(chunks_of(it)[0], "sizes", sizes(3, 3)),
    "another number of axes": lambda it: setattr(chunks_of(it)[0], "sizes", sizes(12)),
    "a scalar twice": lambda it: chunks_of(it, "optimizer.state.w0.step").append(
        chunks_of(it, "optimizer.state.w0.step")[0]
    ),
    "huge": lambda it: setattr(it.state_dict_metadata["model.w0"], "size", sizes(1 << 61, 4)),
    "no size": lambda it: setattr(it.state_dict_metadata["model.w0"], "size", (3, 4)),
    "no chunk": lambda it: chunks_of(it).append({"offsets": sizes(3, 0), "sizes": sizes(0, 4)}),
    "before the shard": lambda it: setattr(place_of(it), "offset", -1),
    "behind the shard": lambda it: setattr(place_of(it), "offset", 1 << 40),
    "no bytes": lambda it: setattr(place_of(it), "length", 0),
    "negative length": lambda it: setattr(place_of(it), "length", -1),
    "place as text": lambda it: setattr(place_of(it), "offset", "0"),
    "transformed": lambda it: setattr(place_of(it), "transform_descriptors", ["stream.zstd"]),
    "entries as a list": lambda it: setattr(it, "state_dict_metadata", []),
    "no places": lambda it: setattr(it, "storage_data", None),
}


@pytest.mark.parametrize("game", GAMES)
def test_metadata_that_leaves_a_part_without_data_is_refused(tmp_path: Path, game: str) -> None:
    folder = saved(tmp_path / "shards", state())
    rewrite(folder, GAMES[game])
    with pytest.raises(CheckpointError, match=rf"{METADATA} cannot be read"):
        ShardReader(folder)


@pytest.mark.parametrize("parts", [[(0, 3)], [(0, 1), (1, 2)], [(2, 1), (0, 2)], [(0, 3), (3, 0)]], ids=str)
def test_chunks_that_cover_a_tensor_are_accepted_in_any_order(tmp_path: Path, parts: list[tuple[int, int]]) -> None:
    folder = saved(tmp_path / "shards", state())
    rewrite(folder, lambda metadata: halves(metadata, *parts))
    entry: Any = ShardReader(folder).read_metadata().state_dict_metadata["model.w0"]
    assert sum(chunk.sizes[0] for chunk in entry.chunks) == 3


PICKLES: dict[str, bytes] = {
    "a call of no function": b"]K\x01\x85R.",
    "a call of a call": b"ctorch\nSize\n)R)R.",
    "a class of a known module": b"cpathlib\nPath\n.",
    "attributes of a name": b"ctorch\nSize.__add__\n.",
    "change of a list": b"]}b.",
    "change of a class": b"ctorch\nSize\n}b.",
    "two changes": b"ctorch\nSize\n)R}b}b.",
    "a list in itself": b"]q\x00h\x00a.",
    "a list in two places": b"(]q\x00h\x00t.",
    "nothing in the memo": b"h\x05.",
    "a place in the memo of its own": b"r\xff\xff\xff\x7f.",
    "a far place in the memo": b"]r\xff\xff\xff\x7f0.",
    "nothing on the stack": b"R.",
    "no mark": b"t.",
    "a mark left": b"(.",
    "two results": b"]].",
    "a tuple as key": b"}(K\x01K\x02\x86K\x03u.",
    "a deep tuple as key": b"}" + b")" + b"\x85" * 200_000 + b"K\x01s.",
    "odd entries": b"}(K\x01u.",
    "entries of a text": b"X\x01\x00\x00\x00a(K\x01e.",
    "an extension": b"\x82\x01.",
    "an instance": b"(itorch\nSize\n.",
    "a foreign object": b"(ctorch\nSize\no.",
    "keywords": b"ctorch\nSize\n)}\x92.",
    "a text longer than the file": b"\x8d" + (1 << 62).to_bytes(8, "little") + b"a.",
    "bytes longer than the file": b"\x8e" + (1 << 40).to_bytes(8, "little") + b"a.",
    "a frame longer than the file": b"\x95" + (1 << 40).to_bytes(8, "little") + b"N.",
    "text that is no UTF-8": b"X\x01\x00\x00\x00\xff.",
    "a name that is no text": b"K\x01K\x02\x93.",
    "a long number": b"I" + b"9" * 100_000 + b"\n.",
    "no end": b"N",
}


@pytest.mark.parametrize("game", PICKLES)
def test_no_odd_pickle_gets_past_the_reader(tmp_path: Path, game: str) -> None:
    folder, file = saved(tmp_path / "shards", state()), tmp_path / "random_state.pt"
    (folder / METADATA).write_bytes(PICKLES[game])
    with pytest.raises(CheckpointError, match=METADATA):
        ShardReader(folder)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", PICKLES[game])
    with pytest.raises(CheckpointError, match=r"random_state\.pt"):
        read_saved(file)


def test_a_saved_value_calls_nothing_that_torch_would_permit(tmp_path: Path) -> None:
    """Torch's restricted unpickler calls DeviceMesh, which can start a process group and wait for another machine."""
    from torch.distributed.device_mesh import DeviceMesh

    class Mesh:
        def __reduce__(self) -> tuple[Any, ...]:
            return DeviceMesh, ("cpu", [0])

    torch.save({"torch": Mesh()}, tmp_path / "random_state.pt")
    with pytest.raises(
        CheckpointError, match=r"is refused, because it asks for torch\.distributed\.device_mesh\.DeviceMesh"
    ):
        read_saved(tmp_path / "random_state.pt")


def repacked(file: Path, change: Callable[[str, bytes], bytes], *, compression: int = zipfile.ZIP_STORED) -> None:
    """Writes an archive again with changed members."""
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, change(name.partition("/")[2], content))


def member(name: str, change: Callable[[bytes], bytes]) -> Callable[[str, bytes], bytes]:
    return lambda found, content: change(content) if found == name else content


def in_pickle(old: bytes, new: bytes) -> Callable[[Path], None]:
    return lambda file: repacked(file, member("data.pkl", lambda content: content.replace(old, new)))


ARCHIVES: dict[str, Callable[[Path], object]] = {
    "compressed": lambda file: repacked(file, lambda _, content: content, compression=zipfile.ZIP_DEFLATED),
    "other byte order": lambda file: repacked(file, member("byteorder", lambda _: b"big")),
    "storage cut": lambda file: repacked(file, member("data/0", lambda content: content[:8])),
    "no storage": in_pickle(b"X\x01\0\0\0000", b"X\x01\0\0\0009"),
    "larger than stored": in_pickle(b"K\x03K\x04\x86", b"K\xffK\xff\x86"),
    "behind what is stored": in_pickle(b"QK\x00", b"QK\x01"),
    "strides beyond": in_pickle(b"K\x04K\x01\x86", b"K\x05K\x01\x86"),
    "claims more than it has": lambda file: file.write_bytes(
        file.read_bytes().replace((48).to_bytes(4, "little") * 2, (1 << 31).to_bytes(4, "little") * 2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("game", ARCHIVES)
def test_an_archive_that_is_not_what_it_states_is_refused(tmp_path: Path, game: str) -> None:
    file = tmp_path / "random_state.pt"
    torch.save({"torch": torch.ones(3, 4)}, file)
    assert torch.equal(read_saved(file)["torch"], torch.ones(3, 4))
    before = file.read_bytes()
    ARCHIVES[game](file)
    assert file.read_bytes() != before
    with pytest.raises(CheckpointError, match=r"random_state\.pt cannot be read"):
        read_saved(file)


def test_a_great_sparse_file_is_not_read(tmp_path: Path) -> None:
    folder, file = saved(tmp_path / "shards", state()), tmp_path / "random_state.pt"
    for path in (folder / METADATA, file):
        path.touch()
        os.truncate(path, 1 << 40)
    with pytest.raises(CheckpointError, match="not a regular file of at most"):
        ShardReader(folder)
    with pytest.raises(CheckpointError, match="not a regular file of at most"):
        read_saved(file)


def put(folder: Path, name: str, value: object) -> None:
    """Replaces what is stored of an entry, in a shard of its own."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    (folder / "own.distcp").write_bytes(buffer.getvalue())

    def change(metadata: Any) -> None:
        info = place_of(metadata, name)
        info.relative_path, info.offset, info.length = "own.distcp", 0, len(buffer.getvalue())

    rewrite(folder, change)


LR, W0 = "optimizer.param_groups.0.lr", "model.w0"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (W0, torch.zeros(3, 5)),
        (W0, torch.zeros(3, 4, dtype=torch.float64)),
        (W0, torch.zeros(4, 4)),
        (W0, "a text"),
        (W0, None),
        (LR, "a text"),
        (LR, [0.5]),
        (LR, torch.zeros(1)),
        ("optimizer.param_groups.0.betas", 0.5),
        ("optimizer.param_groups.0.params", ["w1", "w0"]),
        ("optimizer.param_groups.0.params", []),
    ],
    ids=str,
)
def test_an_entry_of_another_kind_than_described_is_refused(tmp_path: Path, name: str, value: object) -> None:
    folder = saved(tmp_path / "shards", state())
    put(folder, name, value)
    with pytest.raises(CheckpointError, match=rf"the entry '{name}' of .*shards cannot be read"):
        load_shards(state(), folder, no_dist=True)


def test_a_tensor_that_is_described_as_a_value_is_refused(tmp_path: Path) -> None:
    """The value would take the tensor's place in the state, and the model would keep its own weights."""
    folder = saved(tmp_path / "shards", state() | {"model": {"w0": 0.5}})
    with pytest.raises(
        CheckpointError, match=r"'model\.w0' of .* kind 'number or nothing' in place of one of kind 'Tensor'"
    ):
        load_shards({"model": {"w0": torch.ones(2)}}, folder, no_dist=True)


def test_a_pickle_in_place_of_a_tensor_is_refused_by_name(tmp_path: Path) -> None:
    folder, trace = saved(tmp_path / "shards", state()), tmp_path / "it_ran"
    put(folder, W0, Payload(trace))
    with pytest.raises(
        CheckpointError, match=r"'model\.w0' of .* is refused, because it asks for \w+\.mkdir"
    ) as caught:
        load_shards(state(), folder, no_dist=True)
    assert "weights_only" not in str(caught.value)
    assert not trace.exists()


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
