"""Computes signal, noise and direction of gradient estimators from the inner products of their batch gradients.

X_b is the gradient of batch b, for K independent batches:

- `signal = mean over b != b' of X_b . X_b'` is an unbiased estimate of the squared length of the mean gradient.
- `noise = mean of |X_b|^2 - signal` is the variance of one batch. The ratio of two estimators' signal-to-noise ratios
  is the saving in rollouts for an equal signal-to-noise ratio.
- The direction is the cosine between the mean gradients of an estimator and the reference Y,
  `cross / sqrt(signal signal_Y)` with `cross = mean over b != b' of X_b . Y_b'`.
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
    """Inner products of the batch gradients of one estimator X and of the reference Y.

    Attributes:
        own: (K, K), X_b . X_b'.
        cross: (K, K), X_b . Y_b'.
    """

    own: Numbers
    cross: Numbers


@dataclass(frozen=True, kw_only=True)
class GradientFigures:
    """The figures of one estimator, with 95 % intervals from a bootstrap over batches, paired with the reference.

    Attributes:
        snr: signal-to-noise ratio of one batch.
        ratio: of `snr` to the reference's.
        direction: cosine between the mean gradients of the estimator and the reference.
        length: of the mean gradient, relative to the reference's.
    """

    snr: Figure
    ratio: Figure
    direction: Figure
    length: Figure


def gradient_figures(products: Sequence[Products], *, seed: int) -> list[GradientFigures]:
    """Returns the figures of all estimators, from the same draws of batches; the first is the reference."""
    number = len(products[0].own)
    generator = numpy.random.default_rng([seed, 4])
    rows = generator.integers(number, size=(DRAWS, number))
    drawn = numpy.stack([numpy.bincount(row, minlength=number) for row in rows]).astype(float)
    weights = numpy.concatenate([numpy.ones((1, number)), drawn])  # the first row: every batch once
    # Draws with a single distinct batch have no pairs, and a negative signal has no root: such draws do not count.
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
    """Signal and noise for each row of weights, which count how often each batch was drawn."""
    signal = _distinct(own, weights)
    return signal, weights @ own.diagonal() / weights.sum(axis=1) - signal


def _distinct(products: Numbers, weights: Numbers) -> Numbers:
    """The weighted mean over pairs of distinct batches; two copies of one batch are not such a pair."""
    apart = products - numpy.diag(products.diagonal())
    total = ((weights @ apart) * weights).sum(axis=1)
    return total / (weights.sum(axis=1) ** 2 - (weights**2).sum(axis=1))
