"""Defines metrics that carry their reduction, so that parts of a batch, ranks and micro-batches combine exactly."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from cepo.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Reduction = Literal["mean", "sum", "max", "min"]


@dataclass(frozen=True)
class Metric:
    """A partial result: `mean` keeps a weighted sum and its weight, the other reductions keep only the value.

    `result` is None for an empty mean or extreme (weight 0), so that no false 0 is plotted. Value and weight may be
    tensors on a device until `as_numbers` reads them.
    """

    value: float | Tensor
    weight: float | Tensor
    reduction: Reduction

    @property
    def result(self) -> float | None:
        assert isinstance(self.value, (int, float)) and isinstance(self.weight, (int, float)), (
            "the metric was not read from its device"
        )
        if self.reduction == "sum":
            return self.value
        if self.weight == 0:
            return None
        if self.reduction == "mean":
            return self.value / self.weight
        return self.value

    def merge(self, other: Metric) -> Metric:
        assert self.reduction == other.reduction, f"cannot merge {self.reduction} with {other.reduction}"
        weight = self.weight + other.weight
        if self.reduction in ("mean", "sum"):
            return Metric(self.value + other.value, weight, self.reduction)
        if self.weight == 0:
            return other
        if other.weight == 0:
            return self
        extreme = max if self.reduction == "max" else min
        return Metric(extreme(self.value, other.value), weight, self.reduction)


Metrics = dict[str, Metric]


def mean_of(values: Tensor, where: Tensor | None = None) -> Metric:
    """Returns the mean of `values` over the entries where `where` is True (all if None), accumulated in float64."""
    if where is None:
        return Metric(_number(values.double().sum()), float(values.numel()), "mean")
    return Metric(_number(values.double().where(where, 0.0).sum()), _number(where.sum()), "mean")


def fraction(count: float | Tensor, total: float) -> Metric:
    """Returns `count / total`, absent if the total is 0; merged fractions are weighted by their totals."""
    return Metric(_number(count), float(total), "mean")


def mean_value(value: float, weight: float = 1.0) -> Metric:
    return Metric(float(value) * weight, float(weight), "mean")


def share_of_mean(value: float | Tensor) -> Metric:
    """Returns a summand of a mean, such as a micro-batch's or rank's part of a loss; `observations` adds the weight."""
    return Metric(_number(value), 0.0, "mean")


def observations(count: float = 1.0) -> Metric:
    """Returns the weight for the summands of `share_of_mean`; without summands the mean is 0."""
    return Metric(0.0, float(count), "mean")


def sum_value(value: float) -> Metric:
    return Metric(float(value), 1.0, "sum")


def max_value(value: float) -> Metric:
    return Metric(float(value), 1.0, "max")


def max_of(values: Tensor, where: Tensor) -> Metric:
    """Returns the largest of `values` over the entries where `where` is True, absent if there is none."""
    return Metric(_number(values.where(where, float("-inf")).max()), _number(where.any()), "max")


def min_value(value: float) -> Metric:
    return Metric(float(value), 1.0, "min")


def _number(value: float | Tensor) -> float | Tensor:
    """Returns a number of this process as a float, and a device's as it is, because to read it means to wait for it."""
    if isinstance(value, (int, float)):
        return float(value)
    detached = value.detach()
    return float(detached) if detached.device.type == "cpu" else detached


def as_numbers(parts: Sequence[Mapping[str, Metric]]) -> list[Metrics]:
    """Reads all values and weights that are on a device, at once, because each read waits for the device."""
    import torch

    pending = [
        number
        for part in parts
        for metric in part.values()
        for number in (metric.value, metric.weight)
        if not isinstance(number, (int, float))
    ]
    # Per device, in the order above; float64 has the values of all types exactly.
    stacked = torch.stack([number.double() for number in pending]) if pending else torch.empty(0)
    transferred = iter(cast("list[float]", stacked.tolist()))  # pyright: ignore[reportUnknownMemberType]

    def number(value: float | Tensor) -> float:
        return float(value) if isinstance(value, (int, float)) else next(transferred)

    numbers: list[Metrics] = []
    for part in parts:
        read_part: Metrics = {}
        for name, metric in part.items():
            read_part[name] = Metric(number(metric.value), number(metric.weight), metric.reduction)
        numbers.append(read_part)
    return numbers


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            if name in merged:
                merged[name] = merged[name].merge(metric)
            else:
                merged[name] = metric
    return merged


def require_metrics(metrics: Mapping[str, object], source: str) -> Metrics:
    """Returns the metrics that a user's method or loss, so named, gave; raises `ConfigError` if one has no reduction."""
    for name, value in metrics.items():
        if not isinstance(value, Metric):
            raise ConfigError(
                f"{source} returned a {type(value).__name__} for the metric '{name}'; give it with its reduction, such as "
                "cepo.types.mean_of(values, mask)"
            )
    return cast("Metrics", metrics)


def results(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Returns the reduced numbers of all metrics that counted something."""
    numbers: dict[str, float] = {}
    for name, metric in metrics.items():
        number = metric.result
        if number is not None:
            numbers[name] = number
    return numbers


def wilson_interval(fraction: float, count: float | None, z: float = 1.0) -> tuple[float, float] | None:
    """Returns Wilson's interval of a fraction p of n independent samples; None if n is unknown.

    `(p + z^2 / 2n ± z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)`: z is 1 for one standard error and 1.96 for
    95 %. It has a width at p = 0 and p = 1 too, and stays between 0 and 1.
    """
    if count is None or not count > 0 or not math.isfinite(fraction):
        return None
    square = z * z / count
    half = math.sqrt(square * max(fraction * (1 - fraction), 0.0) + square * square / 4)
    low = (fraction + square / 2 - half) / (1 + square)
    high = (fraction + square / 2 + half) / (1 + square)
    return low, high
