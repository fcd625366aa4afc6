"""Checks that a model folder has all weights of its model: a missing one would be drawn at random, without an error."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from cepo.errors import DataError

_FLOATING = ("F64", "F32", "F16", "BF16")
_POSITIONS = re.compile(r".*position_ids")
"""Numbers of positions, which older files hold beside the weights."""
_SPARE_ELEMENTS = 50_000_000
_HARMLESS = re.compile(r".*rotary_emb\.inv_freq|.*position_ids|(model\.)?mtp\..*")
"""What files of the supported families have beside the weights: computed numbers, and a head that only engines use."""
_HEADS = re.compile(r"lm_head\..*|score\..*|v_head\..*|value_head\..*")
"""The heads of language, reward and value models, which the critic replaces by its own."""


def check_stored(folder: Path, model: nn.Module) -> None:
    """Raises DataError unless a folder's files have about as many numbers as the `model` without weights, all floating.

    Loading would otherwise first fill the memory for what a configuration declares and no file has.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    stored = sum(file.stat().st_size for file in folder.glob("*.bin"))  # each number has a byte or more
    for file in files:
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    tensor = tensors.get_slice(name)
                    dtype = tensor.get_dtype()
                    if dtype not in _FLOATING and not _POSITIONS.fullmatch(name):
                        raise DataError(
                            f"{file}: {name[:100]!a} has the type {dtype}; weights are {', '.join(_FLOATING)}"
                        )
                    stored += math.prod(tensor.get_shape())
        except (OSError, SafetensorError) as error:
            raise DataError(f"{file} cannot be read: {error}") from error
    declared = sum(weight.numel() for weight in model.parameters())
    if declared > 2 * stored + _SPARE_ELEMENTS:
        raise DataError(
            f"{folder} declares a model of {declared:,} weights, and its files have {stored:,}; copy or download it again"
        )


def check_loaded(info: Any, *, is_critic: bool) -> None:
    """Raises DataError if transformers has found weights missing, unknown, or of another shape (`output_loading_info`).

    Tied weights count as loaded. Of the critic, the head may be missing or another, because it gets a new one.
    """

    names_of_other_shape = [name for name, *_ in info["mismatched_keys"]]
    differences: dict[str, Iterable[Any]] = {
        "lack weights of the model": info["missing_keys"],
        "have weights that the model does not have": info["unexpected_keys"],
        "have weights of other shapes than the model": names_of_other_shape,
    }
    for description, all_names in differences.items():
        names = _harmful(all_names, is_critic=is_critic)
        if names:
            examples = ", ".join(name[:100] for name in names[:3])
            if len(names) > 3:
                examples += ", ..."
            raise DataError(f"the files {description}: {len(names)} ({examples})")
    if info["error_msgs"]:
        raise DataError(f"the files cannot be read: {info['error_msgs'][0]!s:.300}")


def _harmful(names: Iterable[Any], *, is_critic: bool) -> list[str]:
    """Returns the names, sorted, without those of what is computed and, for a critic, without those of heads."""
    harmful: list[str] = []
    for name in sorted(str(name) for name in names):
        is_replaced_head = is_critic and _HEADS.fullmatch(name)
        if not _HARMLESS.fullmatch(name) and not is_replaced_head:
            harmful.append(name)
    return harmful
