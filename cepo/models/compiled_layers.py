"""Compiles the decoder layers of transformers' models: one graph for all layers of a kind, and rows of any length.

A layer's operations become few kernels, which take a third of the time on a card (docs/gpus.md). FSDP's gathers and
torch's recomputation remain outside of the graph, around the layer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cepo.files.own_cache import cache_folder
from cepo.models.segments import BLOCK_SIZE, SegmentLayout

logger = logging.getLogger(__name__)

Backend = str | Callable[..., object]
"""A backend of `torch.compile`: its name, or a function of a graph and example inputs."""

OPTIONS = {"specialize_float": True, "recompile_limit": 64, "skip_fsdp_guards": False}
"""The compiler's settings: the scales of attention and adapters are constants, a graph is not used for a layer with
another state (its adapter disabled, say) although FSDP manages it, and each such state may have a graph."""


def keep_compiled_code() -> None:
    """Lets later processes take compiled code from a folder of this user that stays, unless the environment names one.

    torch's own is in the folder of temporary files, which a container or a restart empties; importing PEFT is enough for
    torch to name it in the environment.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder("compiled"))


def compile_decoder(decoder: Any, *, backend: Backend = "inductor") -> None:
    """Makes each layer of the decoder compute by a compiled graph, or as before if its code cannot be compiled.

    The graphs are compiled at a layer's first call, one for each combination of gradient, adapter and kind of layer.
    They hold for rows of any number and length. Call it before the layers are sharded.
    """
    if any(hasattr(layer, "linear_attn") for layer in decoder.layers):
        # Traced operation by operation, a loop over chunks, for minutes at a tiny model's sizes.
        logger.warning("%s is not compiled: it has layers of linear attention", type(decoder).__name__)
        return
    kinds: dict[type[nn.Module], _Kind] = {}
    for layer in decoder.layers:
        kind = kinds.setdefault(type(layer), _Kind(type(layer), backend))
        layer.forward = CompiledLayer(layer, kind)


class _Kind:
    """A class of layers, with its compiled code.

    Attributes:
        refused: whether the compiler has refused a layer's first call.
    """

    def __init__(self, layer_class: type[nn.Module], backend: Backend) -> None:
        self.name = layer_class.__name__
        self.forward: Callable[..., Any] = layer_class.forward
        self.compiled = torch.compile(_on_blocks, fullgraph=True, backend=backend)
        self.refused = False


def _on_blocks(
    forward: Callable[..., Any], layer: nn.Module, blocks: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return forward(layer, blocks.flatten(1, 2), *args, **kwargs)


def reason_of(error: Exception) -> str:
    """Returns the compiler's explanation of what it refuses; without one, the first line of its message."""
    lines = str(error).strip().splitlines()
    for line in lines:
        label, _, explanation = line.strip().partition("Explanation: ")
        if label == "" and explanation:
            return explanation
    return lines[0] if lines else type(error).__name__


class CompiledLayer:
    """Stands for a layer's `forward`.

    Once a layer has computed in one way it does so always, so that a recomputation saves the tensors that the pass has
    saved. The first call decides.
    """

    def __init__(self, layer: nn.Module, kind: _Kind) -> None:
        self._layer = layer
        self._kind = kind
        self._is_compiled: bool | None = None

    def __call__(self, hidden: Tensor, *args: Any, segments: SegmentLayout | None = None, **kwargs: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException
        from torch._inductor.exc import InductorError

        if self._is_compiled is None and not self._kind.refused:
            try:
                result = self._by_graph(hidden, args, segments, kwargs)
            except (TorchDynamoException, InductorError) as error:
                self._kind.refused = True
                logger.warning("%s is not compiled, and computes as it is: %s", self._kind.name, reason_of(error))
            else:
                self._is_compiled = True
                return result
        if self._is_compiled:
            return self._by_graph(hidden, args, segments, kwargs)
        self._is_compiled = False
        if segments is not None:
            kwargs["segments"] = segments
        return self._kind.forward(self._layer, hidden, *args, **kwargs)

    def _by_graph(
        self, hidden: Tensor, args: tuple[Any, ...], segments: SegmentLayout | None, kwargs: dict[str, Any]
    ) -> Any:
        block = 1
        if segments is not None:
            kwargs = kwargs | {"segments": segments.for_compiled_layer(hidden.device)}
            # On a card, kernels need no comparison with the row's end if its length is that of whole blocks.
            block = 1 if hidden.device.type == "cpu" else BLOCK_SIZE
        length = hidden.shape[1]
        blocks = hidden.unflatten(1, (-1, block))  # (R, blocks, tokens of a block, H)
        torch._dynamo.maybe_mark_dynamic(blocks, (0, 1))
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                axes = [axis for axis, size in enumerate(tensor.shape) if axis == 0 or size == length]
                torch._dynamo.maybe_mark_dynamic(tensor, axes)
        with torch._dynamo.config.patch(OPTIONS):
            return self._kind.compiled(self._kind.forward, self._layer, blocks, args, kwargs)
