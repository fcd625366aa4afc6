"""Signal, noise and direction of gradient estimators, from the products of their batch gradients.

With X_b the gradient of batch b and K independent batches: `signal = mean over b != b' of X_b . X_b'`, an unbiased estimate
of the squared length of the mean gradient; `noise = mean of |X_b|^2 - signal`, the variance of one batch. At equal
signal-to-noise ratio, the ratio of two estimators' is the saving in rollouts. The direction is the cosine between two mean
gradients, `cross / sqrt(signal signal')` with `cross = mean over b != b' of X_b . X'_b'`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from cepo.credit.agreement import Figure, figure_of

Numbers = NDArray[numpy.float64]
DRAWS = 2000


@dataclass(frozen=True, kw_only=True)
class Products:
    """Products of the batch gradients of one estimator and of the reference.

    Attributes:
        own: (K, K), X_b . X_b' of the estimator.
        cross: (K, K), X_b . Y_b' with Y the reference.
    """

    own: Numbers
    cross: Numbers


@dataclass(frozen=True, kw_only=True)
class GradientFigures:
    """What is known of one estimator; intervals are 95 %, by a bootstrap over batches that is paired with the reference.

    Attributes:
        snr: signal over noise of one batch.
        ratio: of `snr` to the reference's.
        direction: cosine between the mean gradients of the estimator and the reference.
        length: of the mean gradient, relative to the reference's.
    """

    snr: Figure
    ratio: Figure
    direction: Figure
    length: Figure


def gradient_figures(products: Sequence[Products], *, seed: int) -> list[GradientFigures]:
    """Returns the figures of all estimators, of which the first is the reference, for the same draws of batches."""
    number = len(products[0].own)
    generator = numpy.random.default_rng([seed, 4])
    rows = generator.integers(number, size=(DRAWS, number))
    drawn = numpy.stack([numpy.bincount(row, minlength=number) for row in rows]).astype(float)
    weights = numpy.concatenate([numpy.ones((1, number)), drawn])  # the first row: every batch once
    # A draw of a single batch has no pairs, and a signal drawn below 0 no root: such draws do not count.
    with numpy.errstate(invalid="ignore", divide="ignore"):
        reference = _signal_and_noise(products[0].own, weights)
        return [_figures(each, weights, reference) for each in products]


def _figures(products: Products, weights: Numbers, reference: tuple[Numbers, Numbers]) -> GradientFigures:
    signal, noise = _signal_and_noise(products.own, weights)
    other, other_noise = reference
    cross = _distinct(products.cross, weights)
    return GradientFigures(
        snr=figure_of(signal / noise),
        ratio=figure_of(signal / noise / (other / other_noise)),
        direction=figure_of(cross / numpy.sqrt(signal * other)),
        length=figure_of(numpy.sqrt(signal / other)),
    )


def _signal_and_noise(own: Numbers, weights: Numbers) -> tuple[Numbers, Numbers]:
    """Both for each row of weights, which count how often each batch was drawn."""
    signal = _distinct(own, weights)
    return signal, weights @ own.diagonal() / weights.sum(axis=1) - signal


def _distinct(products: Numbers, weights: Numbers) -> Numbers:
    """The weighted mean over pairs of distinct batches; copies of one batch are no such pair."""
    apart = products - numpy.diag(products.diagonal())
    total = ((weights @ apart) * weights).sum(axis=1)
    return total / (weights.sum(axis=1) ** 2 - (weights**2).sum(axis=1))
