"""Metrics as values that carry their reduction, so that parts of a batch, ranks and micro-batches combine exactly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Reduction = Literal["mean", "sum", "max", "min"]


@dataclass(frozen=True)
class Metric:
    """A partial result: `mean` keeps a weighted sum and its weight, the others keep the value alone.

    An empty mean (weight 0) and an empty extreme are absent: `result` is None, so that no made-up 0 gets plotted.
    """

    value: float
    weight: float
    reduction: Reduction

    @property
    def result(self) -> float | None:
        """The reduced number, None where nothing was counted."""
        if self.reduction == "sum":
            return self.value
        if self.weight == 0:
            return None
        return self.value / self.weight if self.reduction == "mean" else self.value

    def merge(self, other: Metric) -> Metric:
        """Combines two partial results of the same reduction."""
        assert self.reduction == other.reduction, f"cannot merge {self.reduction} with {other.reduction}"
        weight = self.weight + other.weight
        if self.reduction in ("mean", "sum"):
            return Metric(self.value + other.value, weight, self.reduction)
        if self.weight == 0 or other.weight == 0:
            return other if self.weight == 0 else self
        extreme = max if self.reduction == "max" else min
        return Metric(extreme(self.value, other.value), weight, self.reduction)


Metrics = dict[str, Metric]


def mean_of(values: Tensor, where: Tensor | None = None) -> Metric:
    """The mean of `values` over the entries where `where` is True (all entries if None), accumulated in float64."""
    kept = values.double() if where is None else values.double()[where]
    return Metric(float(kept.sum()), float(kept.numel()), "mean")


def fraction(count: float, total: float) -> Metric:
    """`count / total`, absent where the total is 0; merged fractions weigh by their totals."""
    return Metric(float(count), float(total), "mean")


def mean_value(value: float, weight: float = 1.0) -> Metric:
    """One number as a mean of weight `weight`."""
    return Metric(float(value) * weight, float(weight), "mean")


def share_of_mean(value: float) -> Metric:
    """A part of observations whose number comes with `observations`: a loss that micro-batches and ranks add up."""
    return Metric(float(value), 0.0, "mean")


def observations(count: float = 1.0) -> Metric:
    """What the parts of `share_of_mean` are divided by; with no part their mean is 0."""
    return Metric(0.0, float(count), "mean")


def sum_value(value: float) -> Metric:
    """A count or an amount that adds up."""
    return Metric(float(value), 1.0, "sum")


def max_value(value: float) -> Metric:
    """A largest value."""
    return Metric(float(value), 1.0, "max")


def min_value(value: float) -> Metric:
    """A smallest value."""
    return Metric(float(value), 1.0, "min")


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Merges several metric mappings name by name."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def results(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The reduced numbers of all metrics that counted something."""
    return {name: value for name, metric in metrics.items() if (value := metric.result) is not None}
