"""How far two float32 computations of one number may lie apart, on any processor: the tests' tolerances follow from this.

Processors and their libraries differ in the order of a sum's terms and in fused products, not in what is summed. A bound
that fits one order of summation on one processor fails on the next; these bounds come from the computation:

* a sum of n products: each of its n roundings is at most `UNIT` of a partial sum. With random signs they add up to
  sqrt(n) UNIT of the root of the squared partial sums, which `sum_of_products` bounds (N. J. Higham and T. Mary, A New
  Approach to Probabilistic Rounding Error Analysis, 2019);
* a whole pass of a model: every weight is moved by one unit at random (`moved_by_one_unit`), which is what one more
  rounding in every product does, and `ORDERS` times the largest change bounds two orders of all sums;
* `LOG_PROBS` and `GRADIENTS` are such bounds for the tests' tiny checkpoints, so that not each test measures again;
  tests/runs/test_actor.py holds them against the measurement on the machine at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

UNIT = torch.finfo(torch.float32).eps / 2
"""The largest relative error of one rounding to float32: 2^-24."""

ORDERS = 8
"""Roundings along a path from a weight to the result for each one that `moved_by_one_unit` makes: sums, norms, softmax."""

LOG_PROBS = 3e-5
"""Nats: between log-probs of one token under a tiny checkpoint, where logits are of order 10."""

GRADIENTS = 3e-5
"""Between gradients of a tiny checkpoint, as a share of the gradient's length."""


def sum_of_products(sizes: float | Tensor, terms: int) -> float:
    """The bound on the error of a sum of `terms` products whose absolute values add up to `sizes` (its largest, of several)."""
    largest = float(sizes.abs().max()) if isinstance(sizes, Tensor) else sizes
    return ORDERS * math.sqrt(terms) * UNIT * largest


@contextmanager
def one_unit_off(tensors: Iterable[Tensor], seed: int = 0) -> Iterator[None]:
    """Each entry is multiplied by 1 + UNIT or 1 - 2 UNIT at random, to the neighbouring float32; afterwards it is as before."""
    tensors = [tensor for tensor in tensors if tensor.dtype is torch.float32]
    assert tensors, "nothing to move"
    originals = [tensor.detach().clone() for tensor in tensors]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in tensors:
            up = torch.rand(tensor.shape, generator=generator) < 0.5
            infinity = torch.full((), math.inf)
            tensor.copy_(torch.where(up, tensor.nextafter(infinity), tensor.nextafter(-infinity)))
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, originals, strict=True):
                tensor.copy_(value)


def moved_by_one_unit(compute: Callable[[], Iterable[Tensor]], tensors: Iterable[Tensor], seeds: int = 2) -> float:
    """The largest change of what `compute` returns when every entry of `tensors` goes to a neighbouring float32."""
    tensors = list(tensors)
    plain = [result.detach().clone() for result in compute()]
    largest = 0.0
    for seed in range(seeds):
        with one_unit_off(tensors, seed):
            moved = [result.detach() for result in compute()]
        for plain_result, moved_result in zip(plain, moved, strict=True):
            difference = float((plain_result - moved_result).abs().max())
            largest = max(largest, difference)
    return largest
