"""Signal, noise and direction of gradients whose distribution is known, and products that are summed in blocks."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from numpy.typing import NDArray

from cepo.errors import ConfigError
from lab.studies.gradient.signal_to_noise import GradientStore, Products, gradient_figures, projected

Numbers = NDArray[numpy.float64]


def products_of(gradients: Numbers, reference: Numbers) -> Products:
    return Products(own=gradients @ gradients.T, cross=gradients @ reference.T)


def test_signal_and_noise_are_means_over_pairs_counted_out() -> None:
    generator = numpy.random.default_rng(0)
    own, other = generator.normal(size=(2, 6, 4)) + 1.0
    found = gradient_figures([products_of(other, other), products_of(own, other)], seed=0)[1]
    pairs = [(one, two) for one in range(6) for two in range(6) if one != two]
    signal, reference = (numpy.mean([each[one] @ each[two] for one, two in pairs]) for each in (own, other))
    noise = numpy.mean([each @ each for each in own]) - signal
    assert found.snr["value"] == pytest.approx(signal / noise)
    cross = numpy.mean([own[one] @ other[two] for one, two in pairs])
    assert found.direction["value"] == pytest.approx(cross / numpy.sqrt(signal * reference))
    assert found.length["value"] == pytest.approx(numpy.sqrt(signal / reference))


def test_draws_of_equal_products_have_no_spread() -> None:
    """Any two batches have the product 2 and each has the square 5, so every draw has signal 2 and noise 3."""
    own = numpy.full((6, 6), 2.0) + 3.0 * numpy.eye(6)
    (found,) = gradient_figures([Products(own=own, cross=own)], seed=0)
    assert (found.snr["value"], found.snr["low"], found.snr["high"]) == pytest.approx((2 / 3, 2 / 3, 2 / 3))


def test_a_known_ratio_and_direction_are_found() -> None:
    """Mean gradients of length 10 with noise of variance 1 in 200 and 0.5 in 200 directions: 100/200 and 100/100, ratio 2.

    The second is turned by 30 degrees.
    """
    generator = numpy.random.default_rng(1)
    first, second = numpy.zeros((2, 200))
    first[0], second[0], second[1] = 10.0, 10.0 * numpy.cos(numpy.pi / 6), 10.0 * numpy.sin(numpy.pi / 6)
    reference = first + generator.normal(size=(400, 200))
    own = second + numpy.sqrt(0.5) * generator.normal(size=(400, 200))
    of_reference, found = gradient_figures([products_of(reference, reference), products_of(own, reference)], seed=0)
    assert of_reference.snr["value"] == pytest.approx(0.5, rel=0.03)
    assert (of_reference.ratio["value"], of_reference.direction["value"]) == pytest.approx((1.0, 1.0))
    assert found.ratio["value"] == pytest.approx(2.0, rel=0.04)
    assert found.direction["value"] == pytest.approx(numpy.cos(numpy.pi / 6), abs=0.01)
    assert found.ratio["low"] is not None
    assert found.ratio["high"] is not None
    assert 1.85 < found.ratio["low"] < 2.0 < found.ratio["high"] < 2.15


def test_intervals_are_as_wide_as_repeated_experiments() -> None:
    """The error from one experiment of 30 batches is the spread of the estimate over 40 experiments, within a third."""
    generator = numpy.random.default_rng(2)
    values: list[float] = []
    errors: list[float] = []
    for _ in range(40):
        common = generator.normal(size=(30, 50))
        reference = 1.0 + common
        own = 1.0 + 0.6 * common + 0.4 * generator.normal(size=(30, 50))
        found = gradient_figures([products_of(reference, reference), products_of(own, reference)], seed=0)[1].ratio
        assert found["value"] is not None
        assert found["error"] is not None
        values.append(found["value"])
        errors.append(found["error"])
    assert numpy.mean(errors) == pytest.approx(numpy.std(values, ddof=1), rel=0.35)


def test_products_in_blocks_are_those_of_whole_gradients(tmp_path: Path) -> None:
    """150,000 weights are more than two blocks; two parameters are one vector."""
    store = GradientStore(tmp_path / "gradients", dimensions=0, seed=0)
    generator = torch.Generator().manual_seed(3)
    gradients = torch.randn(3, 2, 150_000, generator=generator)
    for batch, of_batch in enumerate(gradients):
        store.write(batch, torch.stack([store.reduced([each[:99_999], each[99_999:]]) for each in of_batch]))
    exact = gradients.double().numpy()
    for estimator, found in enumerate(store.products(3)):
        assert found.own == pytest.approx(exact[:, estimator] @ exact[:, estimator].T, rel=1e-9, abs=1e-6)
        assert found.cross == pytest.approx(exact[:, estimator] @ exact[:, 0].T, rel=1e-9, abs=1e-6)
    assert store.largest_length_error(store.products(3), 3) < 1e-6
    assert 2 in store
    assert 3 not in store


def test_projections_keep_inner_products_within_their_error(tmp_path: Path) -> None:
    """Of 4,096 numbers, the deviation is at most sqrt(2 / 4096) = 2.2 % of the lengths; the mean over 40 seeds is unbiased."""
    generator = torch.Generator().manual_seed(4)
    one = torch.randn(1_200_000, generator=generator)
    other = 0.5 * one + torch.randn(1_200_000, generator=generator)
    lengths = float(one.norm() * other.norm())
    errors = [
        (float(projected(one, 4096, seed=seed) @ projected(other, 4096, seed=seed)) - float(one @ other)) / lengths
        for seed in range(40)
    ]
    assert numpy.std(errors) < 1.2 * numpy.sqrt(2 / 4096)
    assert abs(numpy.mean(errors)) < 3 * numpy.sqrt(2 / 4096 / 40)
    store = GradientStore(tmp_path / "gradients", dimensions=4096, seed=0)
    for batch in range(2):
        store.write(batch, torch.stack([store.reduced([one]), store.reduced([other])]))
    assert 0 < store.largest_length_error(store.products(2), 2) < 4 * numpy.sqrt(2 / 4096)


def test_gradients_that_would_fill_the_disk_are_refused(tmp_path: Path) -> None:
    """10^12 weights in 30 batches of 10 gradients are 1.1 million GiB; projected to 65,536 numbers, 75 MiB."""
    with pytest.raises(ConfigError, match=r"need 1117587\.1 GiB .* give projections=65536"):
        GradientStore(tmp_path / "all", dimensions=0, seed=0).require_room(10**12, num_estimators=10, num_batches=30)
    GradientStore(tmp_path / "few", dimensions=65536, seed=0).require_room(10**12, num_estimators=10, num_batches=30)
