"""Checks the numbers in the JSON files of a model folder, which decide how much memory and time its model takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeGuard

from cepo.errors import DataError
from cepo.files.trees import Fields, Tree, is_list, is_mapping
from cepo.models.families import reads_grids

_LONGEST_LIST = 4_096
_LONGEST_TOKEN = 1_000
_MOST_ADDED = 100_000
_MOST_TOKENS = 10_000_000
_NUMBERED = ("added_tokens_decoder.", "id2label.", "label2id.")
"""Mappings with an entry for each of many tokens or labels."""
_MOST_PIXELS = 64_000_000
"""The most pixels of an image that is read, and so the most that a processor needs to make of one."""
_LONGEST_SIDE = 8_000
_MOST_TILES_PER_SIDE = 32
_LARGEST_NUMBER = 10**12
"""Larger than every number that says how large a part is."""
_UNBOUNDED = ("model_max_length", "max_position_embeddings", "num_parameters", "total_size", "num_flops")

_CONFIG_RANGES = {
    "num_hidden_layers": (1, 1_000),
    "depth": (1, 1_000),
    "num_layers": (1, 1_000),
    "num_attention_heads": (1, 10_000),
    "num_key_value_heads": (1, 10_000),
    "num_heads": (1, 10_000),
    "head_dim": (1, 100_000),
    "hidden_size": (1, 1_000_000),
    "out_hidden_size": (1, 1_000_000),
    "embed_dim": (1, 1_000_000),
    "intermediate_size": (1, 10_000_000),
    "moe_intermediate_size": (1, 10_000_000),
    "shared_expert_intermediate_size": (0, 10_000_000),
    "vocab_size": (1, 10_000_000),
    "num_position_embeddings": (1, 10_000_000),
    "num_experts": (0, 10_000),
    "num_local_experts": (0, 10_000),
    "num_experts_per_tok": (0, 10_000),
    "linear_num_key_heads": (1, 10_000),
    "linear_num_value_heads": (1, 10_000),
    "linear_key_head_dim": (1, 100_000),
    "linear_value_head_dim": (1, 100_000),
    "linear_conv_kernel_dim": (1, 1_000),
    "patch_size": (1, 1_024),
    "spatial_patch_size": (1, 1_024),
    "temporal_patch_size": (1, 64),
    "spatial_merge_size": (1, 64),
    "scale_factor": (1, 64),
    "in_channels": (1, 64),
    "in_chans": (1, 64),
    "num_channels": (1, 64),
    "image_size": (1, _LONGEST_SIDE),
    "image_seq_length": (1, 1_000_000),
    "mm_tokens_per_image": (1, 1_000_000),
    "window_size": (1, _LONGEST_SIDE),
    "image_grid_pinpoints": (1, _LONGEST_SIDE),
    "num_labels": (0, 100_000),
}
"""The smallest and largest value of an entry of `config.json`, at any depth; a list has such values."""
_TYPES = ("float64", "float32", "float16", "bfloat16", "auto")
_PROCESSOR_RANGES = {
    "patch_size": (1, 1_024),
    "merge_size": (1, 64),
    "temporal_patch_size": (1, 64),
    "min_pixels": (1, _MOST_PIXELS),
    "max_pixels": (1, _MOST_PIXELS),
    "min_patches": (1, 256),
    "max_patches": (1, 256),
    "height": (1, _LONGEST_SIDE),
    "width": (1, _LONGEST_SIDE),
    "fps": (1e-3, 1_000),
    "num_frames": (1, 10_000),
    "min_frames": (1, 10_000),
    "max_frames": (1, 10_000),
    "max_video_tokens": (1, 10_000_000),
    "image_seq_len": (1, 1_000_000),
    "image_seq_length": (1, 1_000_000),
    "num_image_tokens": (1, 1_000_000),
    "pan_and_scan_min_crop_size": (1, _LONGEST_SIDE),
    "pan_and_scan_max_num_crops": (1, 64),
    "image_grid_pinpoints": (1, _LONGEST_SIDE),
    "resample": (0, 5),
    "rescale_factor": (1e-6, 1e3),
}
_FRACTIONS = ("fps", "rescale_factor")
_SHARED = {"patch_size": "patch_size", "merge_size": "spatial_merge_size", "temporal_patch_size": "temporal_patch_size"}
"""Entries of an image processor that have to equal those of the vision tower."""


def check_config(file: Path, config: Fields) -> None:
    """Raises DataError for a `config.json` with a size out of range, a long list, or tokens outside the vocabulary."""
    _check_plain(file, config)
    for path, tree in _sections(config):
        for name, value in tree.items():
            if name in _CONFIG_RANGES and value is not None:
                low, high = _CONFIG_RANGES[name]
                _require_range(file, f"{path}{name}", value, low, high)
        _check_layers(file, path, tree)
        for name, value in tree.items():
            if name.endswith(("token_id", "token_index")):
                _check_tokens(file, f"{path}{name}", value, config)
            if name in ("dtype", "torch_dtype") and not _is_type(value):
                raise DataError(f"{file}: {path}{name} is {value!r:.100}; accepted: {', '.join(_TYPES)}")


def check_tokenizer_config(file: Path, tree: Fields) -> None:
    """Raises DataError for a `tokenizer_config.json` with long lists, or with tokens that are no texts with numbers."""
    _check_plain(file, tree)
    longest = tree.get("model_max_length")
    if longest is not None and not (_is_number(longest) and longest > 0):
        raise DataError(f"{file}: model_max_length is {longest!r:.100}; accepted: a number above 0")
    names = tree.get("model_input_names")
    if names is not None and not (is_list(names) and "input_ids" in names):
        raise DataError(f"{file}: model_input_names is {names!r:.100}; it has no input_ids")
    added = tree.get("added_tokens_decoder", {})
    if not is_mapping(added) or len(added) > _MOST_ADDED:
        raise DataError(f"{file}: added_tokens_decoder is not a mapping of at most {_MOST_ADDED:,} tokens")
    for index, token in added.items():
        content = token.get("content") if is_mapping(token) else None
        has_text = isinstance(content, str) and 0 < len(content) <= _LONGEST_TOKEN
        if not has_text or not str(index).isdecimal():
            raise DataError(f"{file}: added_tokens_decoder.{index!s:.50} is not a text with its number")


def check_generation(file: Path, generation: Fields, config: Fields) -> None:
    """Raises DataError for a `generation_config.json` whose tokens are no numbers of the vocabulary."""
    _check_plain(file, generation)
    for name, value in generation.items():
        if name.endswith("token_id"):
            _check_tokens(file, name, value, config)


def check_processor(file: Path, processor: Fields, config: Fields) -> None:
    """Raises DataError for a processor's file with sizes out of range, or that do not fit the vision tower's."""
    _check_plain(file, processor)
    # A processor of grids states an image's number of pixels as its edges, other processors a side's length.
    is_grid = reads_grids(config.get("model_type"))
    largest_edge = _MOST_PIXELS if is_grid else _LONGEST_SIDE
    tower = config.get("vision_config")
    for path, tree in _sections(processor):
        for name, value in tree.items():
            _check_processor_entry(file, path, name, value)
        _check_edges(file, path, tree, largest=largest_edge)
        _check_pixels(file, path, tree)
        _check_tiles(file, path, tree)
        if is_grid and is_mapping(tower):
            _check_tower(file, path, tree, tower)


def _check_processor_entry(file: Path, path: str, name: str, value: object) -> None:
    """Refuses an entry that is out of range or of the wrong type by itself."""
    if name.startswith("do_") and not isinstance(value, bool | None):
        raise DataError(f"{file}: {path}{name} is {value!r:.100}; accepted: true or false")
    if value is None:
        return
    if name in _PROCESSOR_RANGES:
        low, high = _PROCESSOR_RANGES[name]
        is_whole = name not in _FRACTIONS
        _require_range(file, f"{path}{name}", value, low, high, whole=is_whole)
    if name in ("image_mean", "image_std"):
        _check_colours(file, f"{path}{name}", value)
    if name == "device":
        raise DataError(f"{file}: {path}device is {value!r:.100}; accepted: null")


def _check_tower(file: Path, path: str, tree: Fields, tower: Fields) -> None:
    """Refuses an image processor whose patches are not those of the vision tower."""
    for name, name_in_tower in _SHARED.items():
        size = tree.get(name)
        size_of_tower = tower.get(name_in_tower)
        if size is None or size_of_tower is None:
            continue
        if size != size_of_tower:
            raise DataError(
                f"{file}: {path}{name} is {size}, but the vision tower's {name_in_tower} in config.json is "
                f"{size_of_tower}; they must be equal"
            )


def vocabulary_size(config: Fields) -> int | None:
    """Returns the number of token ids that `config.json` states; None if it leaves that to its model's class."""
    text = config.get("text_config")
    size = text.get("vocab_size") if is_mapping(text) else None
    if size is None:
        size = config.get("vocab_size")
    return size if isinstance(size, int) else None


def _is_type(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, str) and value.removeprefix("torch.") in _TYPES


def _is_whole(value: object) -> TypeGuard[int]:
    return type(value) is int  # true and false are instances of int


def _is_number(value: object) -> TypeGuard[int | float]:
    return type(value) in (int, float)


def _check_plain(file: Path, tree: Fields) -> None:
    """Refuses long lists and mappings, and numbers that are not finite or larger than any size."""
    for path, section in _sections(tree):
        if len(section) > _LONGEST_LIST and not path.endswith(_NUMBERED):
            raise DataError(f"{file}: {path or 'it'} has {len(section):,} entries; accepted: at most {_LONGEST_LIST:,}")
    for name, value in _leaves(tree, ""):
        if is_list(value) and len(value) > _LONGEST_LIST:
            raise DataError(f"{file}: {name} has {len(value):,} entries; accepted: at most {_LONGEST_LIST:,}")
        if isinstance(value, float) and not math.isfinite(value):
            raise DataError(f"{file}: {name} is {value}; accepted: finite numbers")
        if isinstance(value, int) and abs(value) > _LARGEST_NUMBER and not name.endswith(_UNBOUNDED):
            raise DataError(f"{file}: {name} is out of range; accepted: at most {_LARGEST_NUMBER:,}")


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yields all values that are not mappings, lists and their entries, each with its path."""
    if is_mapping(value):
        for name, entry in value.items():
            path_of_entry = f"{path}.{name}" if path else str(name)
            yield from _leaves(entry, path_of_entry)
        return
    yield path, value
    if is_list(value) and len(value) <= _LONGEST_LIST:
        for entry in value:
            yield from _leaves(entry, path)


def _sections(tree: Fields, path: str = "") -> Iterator[tuple[str, Tree]]:
    """Yields a mapping and those below it, each with its path."""
    yield path, dict(tree)
    for name, value in tree.items():
        if is_mapping(value):
            yield from _sections(value, f"{path}{name}.")


def _require_range(file: Path, name: str, value: object, low: float, high: float, *, whole: bool = True) -> None:
    """Raises DataError unless a number, or each number of a list or mapping, is from `low` to `high`."""
    entries: Iterable[object] = ()
    if is_list(value):
        entries = value
    elif is_mapping(value):  # of height and width, which are checked by their own names
        entries = value.values()
    else:
        is_accepted = _is_whole(value) if whole else _is_number(value)
        if not is_accepted or not low <= float(str(value)) <= high:
            kind = "integers" if whole else "numbers"
            raise DataError(
                f"{file}: {name} is {value!r:.100}, which is out of range; accepted: {kind} from {low:,} to {high:,}"
            )
    for entry in entries:
        _require_range(file, name, entry, low, high, whole=whole)


def _check_layers(file: Path, path: str, tree: Fields) -> None:
    """Refuses kinds of layers, and towers' layers with features, that are not those of the layers."""
    kinds = tree.get("layer_types")
    num_layers = tree.get("num_hidden_layers")
    if kinds is not None and num_layers is not None:
        has_one_for_each = is_list(kinds) and len(kinds) == num_layers
        if not has_one_for_each:
            raise DataError(f"{file}: {path}layer_types does not have one entry for each of the {num_layers} layers")
    depth = tree.get("depth")
    num_blocks = depth if isinstance(depth, int) else 1_000
    for name in ("deepstack_visual_indexes", "fullatt_block_indexes"):
        indexes = tree.get(name)
        if indexes is not None and not _are_different_indexes(indexes, num_blocks):
            raise DataError(
                f"{file}: {path}{name} is {indexes!r:.100}; accepted: different blocks from 0 to {num_blocks - 1}"
            )


def _are_different_indexes(indexes: object, number: int) -> bool:
    """Returns whether a value is a list of different integers from 0 to `number` - 1."""
    if not is_list(indexes):
        return False
    for index in indexes:
        if not _is_whole(index) or not 0 <= index < number:
            return False
    return len(set(indexes)) == len(indexes)


def _check_tokens(file: Path, name: str, value: object, config: Fields) -> None:
    """Refuses ids that are not in the vocabulary. None and, for padding, -1 mean that there is no such token."""
    if name == "pad_token_id" and _is_whole(value) and is_mapping(config.get("text_config")):
        return  # SmolVLM2 has a padding beyond its vocabulary there; the text model's own is the one that is used
    if not is_list(value):
        is_absent_padding = value == -1 and name.endswith("pad_token_id")
        if value is None or is_absent_padding:
            return
    size = vocabulary_size(config)
    for index in value if is_list(value) else [value]:
        is_token = _is_whole(index) and index >= 0 and (size is None or index < size)
        if not is_token:
            last = (size or _MOST_TOKENS) - 1
            raise DataError(f"{file}: {name} is {value!r:.100}; accepted: numbers of tokens from 0 to {last:,}")


def _check_colours(file: Path, name: str, value: object) -> None:
    """Refuses other values than a number for each of the three colours, or one for all."""
    channels = value if is_list(value) else [value]
    low = 1e-6 if name.endswith("std") else -1e3
    are_numbers = all(_is_number(channel) and low <= channel <= 1e3 for channel in channels)
    if len(channels) not in (1, 3) or not are_numbers:
        raise DataError(
            f"{file}: {name} is {value!r:.100}; accepted: a number for each of the three colours, for std above 0"
        )


def _check_edges(file: Path, path: str, tree: Fields, *, largest: int) -> None:
    """Refuses sizes of images that would fill the memory; their edges are at most `largest`."""
    edges: dict[str, int] = {}
    for name in ("size", "crop_size", "max_image_size"):
        size: Any = tree.get(name)
        if size is None:
            continue
        if _is_whole(size):
            _require_range(file, f"{path}{name}", size, 1, _LONGEST_SIDE)
            continue
        if not is_mapping(size):
            raise DataError(f"{file}: {path}{name} is {size!r:.100}; accepted: a mapping of edges, or one number")
        for edge in ("shortest_edge", "longest_edge"):
            length = size.get(edge)
            if length is not None:
                _require_range(file, f"{path}{name}.{edge}", length, 1, largest)
                edges[f"{name}.{edge}"] = length
    shortest = edges.get("size.shortest_edge")
    longest = edges.get("size.longest_edge")
    if shortest is not None and longest is not None and shortest > longest:
        raise DataError(f"{file}: {path}size.shortest_edge is {shortest}, more than its longest_edge {longest}")
    tile = edges.get("max_image_size.longest_edge")
    if longest is not None and tile is not None and longest > _MOST_TILES_PER_SIDE * tile:
        raise DataError(
            f"{file}: {path}size.longest_edge is {longest}, more than {_MOST_TILES_PER_SIDE} tiles of "
            f"max_image_size.longest_edge {tile}"
        )


def _check_pixels(file: Path, path: str, tree: Fields) -> None:
    """Refuses a least number of pixels above the largest one."""
    least = tree.get("min_pixels")
    most = tree.get("max_pixels")
    if least is not None and most is not None and least > most:
        raise DataError(f"{file}: {path}min_pixels is {least}, more than its max_pixels {most}")


def _check_tiles(file: Path, path: str, tree: Fields) -> None:
    """Refuses tiles that have many more pixels together than the image of which they are cut."""
    size = tree.get("size")
    if not is_mapping(size):
        return
    height = size.get("height")
    width = size.get("width")
    if not isinstance(height, int) or not isinstance(width, int):
        return
    num_tiles = tree.get("max_patches")
    if isinstance(num_tiles, int) and num_tiles * height * width > _MOST_PIXELS:
        raise DataError(
            f"{file}: {path}max_patches is {num_tiles}, which makes more than {_MOST_PIXELS:,} pixels of tiles of "
            f"{height} x {width}"
        )
    smallest = min(height, width)
    for pair in tree.get("image_grid_pinpoints") or ():
        if is_list(pair) and max(pair, default=0) > _MOST_TILES_PER_SIDE * smallest:
            raise DataError(
                f"{file}: {path}image_grid_pinpoints has {pair!r:.50}, more than {_MOST_TILES_PER_SIDE} tiles of {smallest}"
            )
