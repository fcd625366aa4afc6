"""1, 2 and 4 ranks over gloo find the same scores, gradients, weights and metrics: FSDP2 in processes of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest
from actors import differing
from rank_scenarios import (
    ACTORS,
    ADAPTER,
    ALL_WEIGHTS,
    COMPILED,
    CRITICS,
    FROZEN_TOWER,
    LEFT_OUT,
    NUM_PICTURES,
    QLORA,
    SERVED_ADAPTERS,
    SHARES,
    Outcome,
    actor_run,
    every_run,
    resumed_runs,
    run_ranks,
    saved_folder,
)
from rounding import GRADIENTS, LOG_PROBS
from torch import Tensor

from cepo.metrics import Metrics, merge_metrics

pytestmark = pytest.mark.heavy

FOUR = pytest.mark.nightly("four processes on two cores take a minute")
SCENARIOS = (*ACTORS, *CRITICS)


def on_ranks(*names: str, numbers: Iterable[int] = (2, 4)) -> pytest.MarkDecorator:
    """Each scenario on each number of ranks that makes it; four ranks at night."""
    pairs = [(name, number) for number in numbers for name in names if name not in LEFT_OUT[number]]
    cases = [pytest.param(name, number, marks=FOUR if number == 4 else ()) for name, number in pairs]
    return pytest.mark.parametrize(("name", "num_ranks"), cases)


RESUMED_BY_ONE = {2: (ALL_WEIGHTS, ADAPTER, QLORA), 4: (ALL_WEIGHTS, ADAPTER)}
"""Scenarios whose checkpoints of so many ranks go on with one."""
Key = TypeVar("Key", str, int)


@dataclass(frozen=True)
class Runs:
    """What ranks find on the model in `folder`: one start of processes for each number of them, when first asked for."""

    folder: Path
    saved: Path

    @cache  # noqa: B019 (the fixture's one object lives as long as its module)
    def found(self, num_ranks: int) -> list[dict[str, Outcome]]:
        """By rank. Each number resumes a checkpoint of half as many ranks, which therefore run before."""
        if num_ranks > 1:
            self.found(num_ranks // 2)
        return run_ranks(every_run, num_ranks, self.folder, self.saved)

    @cache  # noqa: B019
    def resumed(self, saved_by: int, num_ranks: int) -> list[dict[str, Outcome]]:
        """By rank, then `<scenario> <saved_by>`: what goes on from checkpoints of another number of ranks."""
        if num_ranks > saved_by:
            return self.found(num_ranks)
        self.found(saved_by)
        names = RESUMED_BY_ONE[saved_by] if num_ranks == 1 else (ALL_WEIGHTS,)
        return run_ranks(resumed_runs, num_ranks, self.folder, self.saved, {saved_by: names})

    def of(self, num_ranks: int, name: str) -> list[Outcome]:
        return [runs[name] for runs in self.found(num_ranks)]

    def one(self, name: str) -> Outcome:
        return self.of(1, name)[0]


@pytest.fixture(scope="module")
def runs(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tiny_model_folder, tmp_path_factory.mktemp("saved"))


def gap(left: Mapping[Key, Tensor], right: Mapping[Key, Tensor]) -> float:
    """Length of the difference as a share of the length of `left`."""
    assert left.keys() == right.keys()
    difference = sum(float((left[name] - right[name]).double().square().sum()) for name in left)
    length = sum(float(tensor.double().square().sum()) for tensor in left.values())
    return (difference / length) ** 0.5 if length else difference


def together(outcomes: list[Outcome], kind: str) -> dict[int, Tensor]:
    """All ranks' scores by row number; no row has two."""
    merged: dict[int, Tensor] = {}
    for outcome in outcomes:
        assert not merged.keys() & outcome.scores[kind].keys()
        merged |= outcome.scores[kind]
    return merged


def assert_same_metrics(one: Metrics, many: Metrics) -> None:
    assert many.keys() == one.keys()
    for name, metric in one.items():
        if name.startswith("work/"):  # what ranks compute depends on which rows each of them packs
            continue
        if metric.reduction == "mean":
            assert many[name].weight == pytest.approx(metric.weight), name
        # A mean of small numbers of both signs keeps the rounding of the larger ones.
        assert many[name].result == pytest.approx(metric.result, rel=GRADIENTS, abs=GRADIENTS), name


@on_ranks(*SCENARIOS)
def test_scores_and_metrics_of_all_ranks_are_those_of_one(runs: Runs, name: str, num_ranks: int) -> None:
    one_rank = runs.one(name)
    outcomes = runs.of(num_ranks, name)
    assert one_rank.scores
    for kind, scores in one_rank.scores.items():
        assert gap(scores, together(outcomes, kind)) < LOG_PROBS
    for step, metrics in enumerate(one_rank.metrics):
        assert_same_metrics(metrics, merge_metrics([outcome.metrics[step] for outcome in outcomes]))


@on_ranks(*SCENARIOS)
def test_ranks_have_the_gradients_of_one_rank(runs: Runs, name: str, num_ranks: int) -> None:
    """Unsaved buffers are equal bit for bit."""
    one_rank = runs.one(name)
    assert gap(one_rank.initial, one_rank.parameters) > 1e-4
    assert any("inv_freq" in buffer for buffer in one_rank.buffers)
    for outcome in runs.of(num_ranks, name):
        assert differing(one_rank.initial, outcome.initial) == differing(one_rank.buffers, outcome.buffers) == []
        assert gap(one_rank.gradients[0], outcome.gradients[0]) < GRADIENTS
        assert gap(one_rank.parameters, outcome.parameters) < 1e-6
        # Adam gives small gradients whole steps, so rounding shows in what moved: still far below a step.
        assert gap(movement(one_rank), movement(outcome)) < 1e-3


def movement(outcome: Outcome) -> dict[str, Tensor]:
    return {name: outcome.parameters[name] - outcome.initial[name] for name in outcome.initial}


@pytest.mark.nightly("three processes trace a model's layers in both directions, which takes a minute")
def test_two_ranks_train_compiled_layers_as_one_does(tiny_model_folder: Path, tmp_path: Path) -> None:
    """Layers are compiled before they are sharded; each rank traces them by its own rows, of which one has more passes."""
    (one_rank,) = run_ranks(actor_run, 1, tiny_model_folder, COMPILED, tmp_path)
    outcomes: list[Outcome] = run_ranks(actor_run, 2, tiny_model_folder, COMPILED, tmp_path)
    for kind, scores in one_rank.scores.items():
        assert gap(scores, together(outcomes, kind)) < LOG_PROBS
    for outcome in outcomes:
        assert differing(one_rank.initial, outcome.initial) == []
        assert gap(one_rank.gradients[0], outcome.gradients[0]) < GRADIENTS
        differences = gap(movement(one_rank), movement(outcome))
        assert differences < 1e-3, "Adam gives small gradients whole steps, in which rounding shows"
        assert differing(outcome.parameters, outcomes[0].parameters) == []


@on_ranks(ALL_WEIGHTS, FROZEN_TOWER, ADAPTER, QLORA, numbers=(1, 2, 4))
def test_a_frozen_tower_encodes_an_image_once_on_its_rank(runs: Runs, name: str, num_ranks: int) -> None:
    """Each of the three as it is and masked. A trained one does so in every pass: for scores, a teacher, and the update."""
    shares = SHARES[num_ranks][ACTORS[name].share]
    num_encoded: list[int] = []
    for prompts in shares:
        num_pictures = sum(NUM_PICTURES[prompt] for prompt in prompts)
        num_encoded.append(2 * num_pictures)
    assert sum(num_encoded) == 6
    for step in range(ACTORS[name].num_steps):
        reported = [outcome.metrics[step]["work/pictures_encoded"].result for outcome in runs.of(num_ranks, name)]
        if name == ALL_WEIGHTS:
            assert min(reported) >= 4
        else:
            assert reported == num_encoded


@on_ranks(*ACTORS)
def test_every_rank_gets_all_weights_one_tensor_at_a_time(runs: Runs, name: str, num_ranks: int) -> None:
    one_rank = runs.one(name)
    for outcome in runs.of(num_ranks, name):
        assert ("lm_head.weight" in outcome.rollout) == (name not in SERVED_ADAPTERS)
        assert gap(one_rank.rollout, outcome.rollout) < 1e-6
        if name not in SERVED_ADAPTERS:
            assert outcome.most_whole_weights == 1


@on_ranks(*ACTORS, numbers=(1, 2, 4))
def test_an_infinite_gradient_of_one_rank_is_skipped_by_all(runs: Runs, name: str, num_ranks: int) -> None:
    outcomes = runs.of(num_ranks, name)
    assert [outcome.refused_changed for outcome in outcomes] == [[]] * num_ranks
    assert merge_metrics([outcome.refused for outcome in outcomes])["actor/skipped_updates"].result == 1


@pytest.mark.parametrize(
    ("saved_by", "num_ranks"),
    [
        (1, 2),
        (2, 1),
        pytest.param(2, 4, marks=FOUR),
        pytest.param(4, 1, marks=FOUR),
        pytest.param(4, 2, marks=FOUR),
    ],
)
def test_a_checkpoint_goes_on_with_another_number_of_ranks(runs: Runs, saved_by: int, num_ranks: int) -> None:
    names = RESUMED_BY_ONE[saved_by] if num_ranks == 1 else (ALL_WEIGHTS,)
    for name in names:
        one_rank = runs.one(name)
        outcomes = [outcomes[f"{name} {saved_by}"] for outcomes in runs.resumed(saved_by, num_ranks)]
        drawn = [outcome.drawn for outcome in runs.of(saved_by, name)]
        for rank, outcome in enumerate(outcomes):
            assert outcome.drawn == drawn[rank if rank < saved_by else 0]
            assert gap(one_rank.parameters, outcome.parameters) < 1e-6
            assert gap(one_rank.gradients[1], outcome.gradients[0]) < 1e-4
        for kind in ("student 1", "teacher 1"):
            assert gap(one_rank.scores[kind], together(outcomes, kind)) < LOG_PROBS
        assert_same_metrics(one_rank.metrics[1], merge_metrics([outcome.metrics[0] for outcome in outcomes]))


@FOUR
def test_four_ranks_write_one_adapter_and_a_file_each(runs: Runs) -> None:
    runs.found(4)
    folder = saved_folder(runs.saved, ADAPTER, 4)
    assert sorted(path.name for path in folder.iterdir()) == ["distributed", "lora_adapter"]
    files = sorted(path.name for path in (folder / "distributed").iterdir())
    assert files == [f"rank_{rank}_of_4.safetensors" for rank in range(4)]
