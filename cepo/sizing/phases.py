"""Decides whether a step's phases fit on a device next to the rollout engine, and whether the engine has to sleep."""

from __future__ import annotations

from dataclasses import dataclass

ASLEEP_BYTES = 2 * 2**30
"""The device memory that a sleeping engine keeps: CUDA graphs and working buffers. An estimate, not yet measured."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The bytes that all trained models together need on one device.

    Attributes:
        loaded: weights and copies, on the device when the engine starts.
        kept: bytes beyond `loaded` that remain during sampling, from the second step on.
        certain: the part of the peak beyond `loaded` during scoring and update that does not depend on lengths.
        bound: the same with the upper bounds of the activations.
        engine: the minimum that the engine needs: its weights and the KV cache of one request.
        with_vllm: vLLM samples. The weights of another generator remain on the device and are part of the sums above.
    """

    loaded: int
    kept: int
    certain: int
    bound: int
    engine: int
    with_vllm: bool = True


@dataclass(frozen=True, kw_only=True)
class Phases:
    """The result of `plan_phases` for a device.

    Attributes:
        sleeps: the engine frees its memory while rows are scored and weights are updated.
        sampling_left, training_left: free bytes in the two phases, with the upper bounds; if negative, it may not fit.
        refused: why the run cannot start; None if it can.
    """

    sleeps: bool
    sampling_left: int
    training_left: int
    refused: str | None

    @property
    def fits(self) -> bool:
        """Whether both phases fit with the upper bounds."""
        return self.refused is None and min(self.sampling_left, self.training_left) >= 0

    @property
    def in_words(self) -> str:
        """The verdict: `fits`, `sleeps`, `tight` (the certain part fits, the upper bound does not) or `refused`."""
        if self.refused is not None:
            return "refused"
        return ("sleeps" if self.sleeps else "fits") if self.fits else "tight"


def plan_phases(demand: Demand, *, free: int, share: int, sleep: str) -> Phases:
    """Plans the phases of a step on a device.

    Sampling needs the engine's share and `kept`. Training needs `bound`, and either the engine's share or the memory
    that a sleeping engine keeps. Sleeping copies the engine's weights over the bus twice per step, so `auto` sleeps
    only if training would not fit next to the engine's share.

    Args:
        free: free bytes of the device after the trained models are loaded, before the engine takes its share.
        share: bytes of vLLM's share of the device; 0 for another generator, which cannot sleep.
        sleep: `worker.rollout.sleep`.
    """
    beside = free - share
    sleeps = share > 0 and (sleep == "always" or (sleep == "auto" and demand.bound > beside))
    training = free - ASLEEP_BYTES if sleeps else beside
    return Phases(
        sleeps=sleeps,
        sampling_left=beside - demand.kept,
        training_left=training - demand.bound,
        # The memory of a sleeping engine is too uncertain to refuse a run because of it.
        refused=_refused(demand, beside=beside, training=free if sleeps else beside, share=share, sleeps=sleeps),
    )


def _refused(demand: Demand, *, beside: int, training: int, share: int, sleeps: bool) -> str | None:
    if 0 < share < demand.engine:
        return f"vLLM's share is {gib(share)}, but its weights and one request need {gib(demand.engine)}"
    if demand.kept > beside:
        return (
            f"while responses are sampled, the trainer keeps {gib(demand.loaded + demand.kept)} beside vLLM's share of "
            f"{gib(share)}: {gib(demand.kept - beside)} too much"
        )
    if demand.certain > training:
        where = "beside a sleeping vLLM" if sleeps else "beside vLLM's share" if share else "on the device"
        return (
            f"scoring and update need {gib(demand.loaded + demand.certain)} {where} before any activation: "
            f"{gib(demand.certain - training)} too much"
        )
    return None


def gib(num_bytes: float) -> str:
    """Formats bytes in GiB, or in MiB below one GiB."""
    return f"{num_bytes / 2**20:.0f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.1f} GiB"
