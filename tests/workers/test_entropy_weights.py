"""The weight of a distilled token by its teacher's entropy, worked out by hand."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from cepo.types import Distillation, DivergenceConfig
from cepo.workers.actor import Actor
from cepo.workers.distributed import data_parallel_mesh
from cepo.workers.hidden_state_cache import HiddenStateCache


@pytest.fixture
def one_rank() -> Iterator[None]:
    data_parallel_mesh(-1)
    yield
    dist.destroy_process_group()


def weights(beta: float, token_weight: list[list[float]]) -> list[list[float]]:
    """Of rows 4 and 7, whose teacher has entropies 0, log 2 and log 4 nats in the first; the other has none."""
    hidden_states = HiddenStateCache()
    hidden_states.entropies = {4: torch.tensor([0.0, math.log(2), math.log(4)])}
    distillation = Distillation(
        view="correct",
        divergence=DivergenceConfig(entropy_beta=beta),
        token_weight=torch.tensor(token_weight),
    )
    rows = [SimpleNamespace(row=4), SimpleNamespace(row=7)]
    batch: Any = SimpleNamespace(rows=rows)
    actor = cast("Actor", SimpleNamespace(kept=hidden_states, device=torch.device("cpu")))
    return Actor._weighted_by_entropy(actor, batch, distillation).tolist()


@pytest.mark.usefixtures("one_rank")
def test_sure_teachers_count_more_and_the_mean_stays() -> None:
    """exp(-H) is 1, 1/2 and 1/4 of mean 7/12, and squared 1, 1/4 and 1/16 of mean 7/16; rows without a teacher keep 0."""
    taught = [[2.0, 2.0, 2.0], [0.0, 0.0, 0.0]]
    assert weights(1.0, taught)[0] == pytest.approx([24 / 7, 12 / 7, 6 / 7])
    assert weights(2.0, taught)[0] == pytest.approx([32 / 7, 8 / 7, 2 / 7])
    assert weights(1.0, taught)[1] == [0.0, 0.0, 0.0]


@pytest.mark.usefixtures("one_rank")
def test_tokens_that_are_not_distilled_do_not_count_in_the_mean() -> None:
    """Without the last token 1 and 1/2 have the mean 3/4; without any, nothing is divided by 0."""
    assert weights(1.0, [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])[0] == pytest.approx([4 / 3, 2 / 3, 0.0])
    assert weights(1.0, [[0.0] * 3] * 2) == [[0.0] * 3] * 2


def rank(number: int, store: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    lengths = [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
    taught = [lengths[number], [0.0, 0.0, 0.0]]
    results.put((number, weights(1.0, taught)[0]))
    dist.destroy_process_group()


def test_the_mean_is_over_the_tokens_of_all_ranks(tmp_path: Path) -> None:
    """One has 1, 1/2 and 1/4, the other 1, of mean 11/16."""
    fork = multiprocessing.get_context("fork")
    results: Any = fork.SimpleQueue()
    ranks = [fork.Process(target=rank, args=(number, str(tmp_path / "store"), results)) for number in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    of_ranks = dict(results.get() for _ in ranks)
    assert of_ranks[0] == pytest.approx([16 / 11, 8 / 11, 4 / 11])
    assert of_ranks[1] == pytest.approx([16 / 11, 0.0, 0.0])
