"""When vLLM gives its memory back between phases."""

from __future__ import annotations

from cepo.doctor.memory import Estimate
from cepo.rollout.sleeping import sleeps_between_phases

GIB = 2**30


def test_auto_sleeps_only_where_the_update_needs_more_than_is_free_beside_the_engine() -> None:
    assert not sleeps_between_phases("auto", free_bytes=20 * GIB, update_bytes=12 * GIB)
    assert not sleeps_between_phases("auto", free_bytes=12 * GIB, update_bytes=12 * GIB)
    assert sleeps_between_phases("auto", free_bytes=12 * GIB, update_bytes=12 * GIB + 1)
    assert sleeps_between_phases("auto", free_bytes=-GIB, update_bytes=0)  # the engine's share alone is too large


def test_always_and_never_do_not_look_at_memory() -> None:
    assert sleeps_between_phases("always", free_bytes=80 * GIB, update_bytes=0)
    assert not sleeps_between_phases("never", free_bytes=0, update_bytes=80 * GIB)


def test_an_update_takes_all_but_the_weights_and_their_copies() -> None:
    estimate = Estimate(weights=1000, gathered=200, gradients=30, optimizer=60, copies=500, activations=7)
    assert estimate.total == 1797
    assert estimate.beyond_weights == 200 + 30 + 60 + 7
