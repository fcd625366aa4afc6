"""Stands in for what vLLM reads from a GPU that computes nothing: copies by the runtime's own handle, tokens, and counts.

Groups of several ranks on cards are of torch's backend "fake" in place of NCCL.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

TOKEN = 7
"""The token that is sampled at every position: a kernel would have written one."""


class _HostCopies:
    """The two functions of the CUDA runtime that vLLM's allocator for sleeping engines looks up in the library's file."""

    def cudaMemcpy(self, to: int, source: int, num_bytes: int) -> None:  # noqa: N802
        # Their content is no weights: the first and the last byte show that the memory may be touched.
        ctypes.memmove(to, source, 1)
        ctypes.memmove(to + num_bytes - 1, source + num_bytes - 1, 1)

    def cudaMemset(self, pointer: int, value: int, num_bytes: int) -> None:  # noqa: N802
        ctypes.memset(pointer, value, 1)
        ctypes.memset(pointer + num_bytes - 1, value, 1)


def stand_in() -> None:
    """Replaces them in this process, for vLLM's V2 model runner."""
    import vllm.device_allocator.cumem as sleeping
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu.async_utils import AsyncOutput

    os.environ["VLLM_DISABLE_PYNCCL"] = "1"
    type(current_platform).dist_backend = "fake"
    sleeping.libcudart = _HostCopies()
    plain_output = AsyncOutput.get_output

    def output_with_tokens(output: Any) -> Any:
        output.num_sampled_tokens_np[:] = 1
        output.sampled_token_ids[:] = TOKEN
        if output.logprobs_tensors is not None:
            with torch.inference_mode():
                output.logprobs_tensors.logprob_token_ids.fill_(TOKEN)
        return plain_output(output)

    AsyncOutput.get_output = output_with_tokens  # pyright: ignore[reportAttributeAccessIssue]
    torch.unique = _unique_on_host(torch.unique)
    _keep_all_tiles()


def _keep_all_tiles() -> None:
    """Lets vLLM's SmolVLM take all tiles of an image: it counts a tile's zeros on the device to drop empty ones."""
    from vllm.model_executor.models.idefics3 import Idefics3Model

    plain_features = Idefics3Model.image_pixels_to_features

    def features_of_all(model: Any, *arguments: Any, **keywords: Any) -> torch.Tensor:
        return plain_features(model, *arguments, **keywords | {"remove_padding": False})

    Idefics3Model.image_pixels_to_features = features_of_all  # pyright: ignore[reportAttributeAccessIssue]


def _unique_on_host(unique: Any) -> Any:
    """Returns torch's function computed on the host: on the device its result's size is whatever memory held."""

    def on_host(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        if not tensor.is_cuda:
            return unique(tensor, *arguments, **keywords)
        results = unique(tensor.cpu(), *arguments, **keywords)
        if isinstance(results, tuple):
            return tuple(result.to(tensor.device) for result in results)
        return results.to(tensor.device)

    return on_host
