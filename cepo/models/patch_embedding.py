"""Computes the patch embedding of a vision tower as a linear layer instead of a convolution.

Towers that read patches on a grid embed each patch by a three-dimensional convolution whose kernel covers the whole
patch, so it is one product of the flattened patch with the flattened kernel. As a convolution it is slow in bf16, on
GPUs (cuDNN has no fast kernel for it) and on CPUs, and in float32 a GPU would round its operands to TF32.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class PatchConvolution(nn.Conv3d):
    """Embeds patches of exactly the kernel's size: `y = W x + b` with the flattened kernel W and patch x.

    Weight and bias keep the convolution's names and shapes, (out, channels, time, height, width) and (out,). In float32 on
    a CPU it stays a convolution: the product sums in another order, which would change recorded runs in the last bits.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Converts (patches, channels, time, height, width) to (patches, out, 1, 1, 1).

        Raises `ValueError`: the patches are not of the kernel's size.
        """
        if input.shape[1:] != self.weight.shape[1:]:
            raise ValueError(
                f"the patches are of shape {tuple(input.shape[1:])} (channels, time, height, width), but the patch "
                f"embedding's kernel is of shape {tuple(self.weight.shape[1:])}; the two must be equal"
            )
        if input.device.type == "cpu" and input.dtype is torch.float32:
            return super().forward(input)
        return self.product(input)

    def product(self, input: Tensor) -> Tensor:
        """Computes `forward` for patches of the kernel's size on any device, as one matrix product."""
        patches = input.flatten(1)  # (patches, channels * time * height * width)
        kernel = self.weight.flatten(1)  # (out, channels * time * height * width)
        embeddings = linear(patches, kernel, self.bias)  # (patches, out)
        return embeddings[:, :, None, None, None]


def use_linear_patch_embedding(parts: Iterable[nn.Module]) -> None:
    """Converts each patch embedding in `parts` to a `PatchConvolution`.

    A patch embedding is a three-dimensional convolution whose stride is its kernel size.
    """
    for part in parts:
        for module in part.modules():
            if _embeds_patches(module):
                module.__class__ = PatchConvolution


def _embeds_patches(module: nn.Module) -> bool:
    if type(module) is not nn.Conv3d:
        return False
    is_plain = module.groups == 1 and set(module.dilation) == {1} and module.padding == (0, 0, 0)
    return is_plain and module.stride == module.kernel_size
