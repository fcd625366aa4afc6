"""Clips probability ratios, and names the metrics of clipped tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cepo.losses.settings import ClipConfig

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

HIGHER = "actor/pg_clipfrac_higher"
LOWER = "actor/pg_clipfrac_lower"


def clipped_ratio(ratio: Float[Tensor, "*shape"], config: ClipConfig) -> Float[Tensor, "*shape"]:
    """Returns `clip(rho, 1 - clip_ratio_low, 1 + clip_ratio_high)`."""
    return ratio.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)
