"""Whether a step fits on a device, and when vLLM gives its memory back between phases."""

from __future__ import annotations

import dataclasses

import pytest
from doctor_cases import GIB

from cepo.sizing.memory import Estimate
from cepo.sizing.phases import ASLEEP_BYTES, Demand, Phases, plan_phases

DEMAND = Demand(loaded=5 * GIB, kept=2 * GIB, certain=8 * GIB, bound=12 * GIB, engine=6 * GIB)


def phases(free: int, share: int = 40 * GIB, sleep: str = "auto", **changes: int) -> Phases:
    return plan_phases(dataclasses.replace(DEMAND, **changes), free=free, share=share, sleep=sleep)


def test_auto_sleeps_only_where_memory_beside_vllm_is_short() -> None:
    """Scoring or update needs more than is free."""
    assert not phases(52 * GIB).sleeps
    assert phases(52 * GIB - 1).sleeps
    assert [phases(free * GIB).in_words for free in (60, 52, 51)] == ["fits", "fits", "sleeps"]


def test_always_and_never_do_not_look_at_memory() -> None:
    assert phases(80 * GIB, sleep="always").sleeps
    assert not phases(51 * GIB, sleep="never").sleeps
    assert not phases(20 * GIB, share=0, sleep="always").sleeps, "only vLLM can sleep"


def test_what_stays_must_fit_beside_the_waking_engine() -> None:
    """Where the optimizer's state is not counted, the engine starts, step 1 passes, and step 2 has no memory to wake up."""
    assert phases(42 * GIB).in_words == "sleeps"
    late = phases(42 * GIB - 1)
    assert late.refused is not None
    assert "while responses are sampled, the trainer keeps 7.0 GiB beside vLLM's share of 40.0 GiB" in late.refused
    assert phases(42 * GIB, kept=2 * GIB + 1).refused
    assert phases(41 * GIB, kept=-3 * GIB).refused is None, "weights that leave the device make room"


def test_a_certain_excess_is_refused_and_a_bound_is_tight() -> None:
    """A certain part that exceeds the device is refused; where the upper bound alone exceeds it, memory is tight."""

    def asleep(free: int) -> Phases:
        return phases(free, share=4 * GIB, kept=0, engine=0)

    assert asleep(8 * GIB).in_words == "tight"
    assert asleep(12 * GIB + ASLEEP_BYTES).in_words == "sleeps"
    assert asleep(12 * GIB + ASLEEP_BYTES - 1).in_words == "tight"
    refused = asleep(8 * GIB - 1).refused
    assert refused is not None
    assert "need 13.0 GiB beside a sleeping vLLM" in refused
    awake = phases(47 * GIB, sleep="never").refused
    assert awake is not None
    assert "beside vLLM's share" in awake


def test_a_share_below_the_engines_weights_is_refused() -> None:
    assert phases(80 * GIB, share=6 * GIB).refused is None
    assert "its weights and one request need 6.0 GiB" in (phases(80 * GIB, share=6 * GIB - 1).refused or "")


@pytest.mark.parametrize(("scoring", "total"), [(28, 1797), (2000, 500 + 1000 + 60 + 200 + 8 + 2000)])
def test_a_step_takes_the_larger_of_update_and_scoring(scoring: int, total: int) -> None:
    """Scoring has no gradients."""
    estimate = Estimate(
        weights=1000, gathered=200, gradients=30, optimizer=60, copies=500, activations=7, scoring=scoring, swapped=8
    )
    assert estimate.total == total
    assert (estimate.loaded, estimate.kept) == (1500, 60)
    assert estimate.certain == 1500 + 60 + 30 + 200


def test_a_step_takes_the_larger_of_backward_and_optimizer() -> None:
    estimate = Estimate(
        weights=100, gathered=20, gradients=30, optimizer=60, copies=0, activations=7, reducing=5, stepping=33
    )
    assert estimate.certain == 100 + 30 + 60 + 33
    assert estimate.total == 100 + 30 + 60 + 33
    assert dataclasses.replace(estimate, stepping=31).total == 100 + 30 + 60 + 20 + 5 + 7


def test_state_that_leaves_the_device_is_not_counted() -> None:
    """It is counted neither while sampling nor while scoring."""
    estimate = Estimate(
        weights=100, gathered=20, gradients=0, optimizer=60, copies=0, activations=0, scoring=500,
        leaves_while_sampling=160, leaves_while_scoring=60,
    )  # fmt: skip
    assert estimate.kept == -100
    assert estimate.total == 100 + 20 + 500
