"""Computes signal, noise and direction of gradient estimators from the inner products of their batch gradients.

X_b is the gradient of batch b, for K independent batches:

- `signal = mean over b != b' of X_b . X_b'` is an unbiased estimate of the squared length of the mean gradient.
- `noise = mean of |X_b|^2 - signal` is the variance of one batch. The ratio of two estimators' signal-to-noise ratios
  is the saving in rollouts for an equal signal-to-noise ratio.
- The direction is the cosine between the mean gradients of an estimator and the reference Y,
  `cross / sqrt(signal signal_Y)` with `cross = mean over b != b' of X_b . Y_b'`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from cepo.credit.agreement import Figure, figure_of
from cepo.errors import ConfigError

_BLOCK = 1 << 16
_FREE_SHARE = 0.8


class GradientStore:
    """The gradients of S estimators for K batches in `folder`, with a file of (S, D + 1) float32 per batch.

    Args:
        dimensions: 0 stores whole gradients; otherwise each is projected to that many numbers (`projected`).
        seed: of the projection.
    """

    def __init__(self, folder: Path, *, dimensions: int, seed: int) -> None:
        self._folder, self._dimensions, self._seed = folder, dimensions, seed
        folder.mkdir(exist_ok=True)

    def __contains__(self, batch: int) -> bool:
        return self._file(batch).is_file()

    def require_room(self, num_weights: int, *, num_estimators: int, num_batches: int) -> None:
        """Raises ConfigError if the missing gradients would fill the disk."""
        missing = sum(batch not in self for batch in range(num_batches))
        needed = missing * num_estimators * (self._dimensions or num_weights) * 4
        free = shutil.disk_usage(self._folder).free
        if needed > _FREE_SHARE * free:
            raise ConfigError(
                f"{num_batches} batches of {num_estimators} gradients need {needed / 2**30:.1f} GiB in {self._folder}, where "
                f"{free / 2**30:.1f} GiB are free; give projections=65536 to keep that many numbers of each"
            )

    def reduced(self, gradient: Sequence[Tensor]) -> Tensor:
        """Returns the stored form of a gradient, (D + 1,); its last number is the exact squared length."""
        flat = torch.cat([part.flatten() for part in gradient])
        kept = projected(flat, self._dimensions, seed=self._seed) if self._dimensions else flat
        return torch.cat([kept, flat.double().square().sum().float().unsqueeze(0)])

    def write(self, batch: int, gradients: Tensor) -> None:
        """Writes the gradients of a batch, (S, D + 1), atomically: an interrupted run leaves no partial file."""
        beside = self._folder / f"{batch}.new.npy"
        numpy.save(beside, gradients.numpy())
        os.replace(beside, self._file(batch))

    def products(self, num_batches: int) -> list[Products]:
        """Returns each estimator's inner products with itself and with the first one, summed in float64 by blocks."""
        files = [numpy.load(self._file(batch), mmap_mode="r") for batch in range(num_batches)]
        num_estimators, width = files[0].shape
        own = numpy.zeros((num_estimators, num_batches, num_batches))
        cross = numpy.zeros_like(own)
        for start in range(0, width - 1, _BLOCK):
            end = min(start + _BLOCK, width - 1)
            block = numpy.stack([file[:, start:end] for file in files], axis=1).astype(numpy.float64)
            own += block @ block.transpose(0, 2, 1)
            cross += block @ block[0].T
        return [Products(own=one, cross=other) for one, other in zip(own, cross, strict=True)]

    def largest_length_error(self, products: Sequence[Products], num_batches: int) -> float:
        """Returns the largest relative error of a stored squared length: 0 up to rounding without projection."""
        exact = numpy.stack(
            [numpy.load(self._file(batch), mmap_mode="r")[:, -1] for batch in range(num_batches)], axis=1
        )
        kept = numpy.stack([each.own.diagonal() for each in products])
        return float(numpy.abs(kept / exact - 1.0).max())

    def remove(self) -> None:
        """Deletes all gradients."""
        shutil.rmtree(self._folder)

    def _file(self, batch: int) -> Path:
        return self._folder / f"{batch}.npy"


def projected(flat: Tensor, dimensions: int, *, seed: int) -> Tensor:
    """Projects a gradient by a count sketch (Charikar et al. 2002).

    Each entry is added with a random sign to a random one of `dimensions` numbers. Inner products are unbiased, with a
    standard deviation of at most `sqrt(2 / dimensions) |x| |y|`. Gradients with the same seed get the same projection.
    """
    kept = torch.zeros(dimensions, dtype=torch.float64)
    for number, block in enumerate(flat.split(1 << 20)):
        generator = torch.Generator().manual_seed((seed << 24) + number)
        place = torch.randint(dimensions, block.shape, generator=generator)
        sign = torch.randint(2, block.shape, generator=generator) * 2 - 1
        kept.index_add_(0, place, block.double() * sign)
    return kept.float()


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
