"""Declares the settings of `worker.actor` that policy losses share; a loss's `Config` has a field for each it reads."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cepo.sections.fields import NotNegative, Positive, Share, section

DEFAULT_LOSS = "default"
"""EasyR1's name of PPO's clipped loss."""


@section
class NoLossSettings:
    """The settings of a loss that has none."""


@section
class ClipConfig:
    """The range of the probability ratio, [1 - clip_ratio_low, 1 + clip_ratio_high]."""

    clip_ratio_low: Share = 0.2
    """Lower clip range: the probability ratio is clipped at 1 - clip_ratio_low."""
    clip_ratio_high: NotNegative = 0.28
    """Upper clip range: the probability ratio is clipped at 1 + clip_ratio_high."""


@section
class DualClipConfig(ClipConfig):
    """Adds the bound of losses with a negative advantage."""

    clip_ratio_dual: Annotated[float, Field(gt=1)] | None = 3.0
    """Dual clip: a token with negative advantage A has a loss of at most -A times this; null: no bound."""


@section
class GateConfig:
    """The temperatures of a soft gate."""

    tau_positive: Positive = 1.0
    """Temperature of the gate of loss_type `sapo` for advantages of 0 or more."""
    tau_negative: Positive = 1.05
    """Temperature of the gate of loss_type `sapo` for negative advantages."""


@section
class SharedLossSettings(DualClipConfig, GateConfig):
    """The settings of `worker.actor` that losses read."""
