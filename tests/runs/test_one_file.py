"""CEPO in one file against the package: the same rollouts give the same advantages and the same gradient; and it learns."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rounding import GRADIENTS
from training_runs import REPOSITORY, actor_of, checked_config, differing, parameters_of, relative_gap

from cepo.microgeo.world import ASSETS
from cepo.train import build_trainer
from cepo.trainer.asking import Rollouts
from cepo.trainer.planning import actor_batches

pytestmark = pytest.mark.heavy
FILE = REPOSITORY / "examples" / "cepo_in_one_file.py"


@pytest.fixture(scope="module")
def one_file() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cepo_in_one_file", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def loaded(one_file: ModuleType) -> tuple[Any, Any]:
    """The shipped model of the embedded world, and its processor."""
    return one_file.load(str(ASSETS))


def test_it_has_300_lines_and_needs_no_further_library() -> None:
    source = FILE.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 300
    imported = [
        line.split()[1].partition(".")[0] for line in source.splitlines() if line.startswith(("import", "from"))
    ]
    own = set(imported) - set(sys.stdlib_module_names)
    assert own == {"torch", "transformers"}
    inner = [line.strip() for line in source.splitlines() if line.startswith(" ") and " import " in line]
    assert inner == ["from cepo.microgeo.world import SHAPES"], "the package gives the data alone"


def in_its_words(one_file: ModuleType, rollouts: Rollouts) -> tuple[list[Any], list[list[int]]]:
    """The problems and responses of a step of the package, as the file has them."""
    problems = [
        one_file.Problem(
            each.images[0], each.text.removeprefix("<image>").removesuffix(" Answer in \\boxed{}."), each.ground_truth
        )
        for each in rollouts.problems
    ]
    return problems, [list(generation.response_ids) for generation in rollouts.generations]


def test_the_same_rollouts_give_the_packages_gradient(
    one_file: ModuleType, loaded: tuple[Any, Any], tiny_run: list[str], tmp_path: Path
) -> None:
    arguments = [
        *tiny_run,
        "algorithm.adv_estimator=cepo",
        f"worker.actor.model.model_path={ASSETS}",
        "worker.actor.global_batch_size=4",
        "worker.actor.loss_avg_mode=seq",
        "worker.reward.reward_function=null",
        "data.max_response_length=64",
        f"trainer.save_checkpoint_path={tmp_path}",
    ]
    with ExitStack() as stack:
        trainer = build_trainer(checked_config(arguments), stack)
        rollouts = trainer.ask(0)
        plan = trainer.plan(rollouts)
        batch = trainer.score(plan)
        signal = trainer.estimate(batch)
        (update,) = actor_batches(batch, signal, num_prompts=4, max_response_length=64)
        actor = actor_of(trainer)
        gradient = dict(zip(parameters_of(actor), actor.gradients(update), strict=True))
    taught = plan.live & plan.views[1].has_reference
    assert taught.any(), "some group must be mixed, and have a wrong answer"

    model, processor = loaded
    settings = replace(one_file.Settings(), group_size=4)
    problems, responses = in_its_words(one_file, rollouts)
    credit = one_file.credit_of(model, processor, problems, responses, settings, step=0)
    torch.testing.assert_close(credit.rewards, rollouts.rewards, rtol=0, atol=0)
    assert torch.equal(credit.mask, rollouts.response_mask)
    torch.testing.assert_close(credit.advantages, signal.advantages, rtol=0, atol=1e-5)

    one_file.accumulate_gradient(model, processor, problems, responses, credit, settings)
    own = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    package = {name.removeprefix("model."): each for name, each in gradient.items()}
    assert set(package) <= set(own), sorted(set(package) - set(own))
    flat = [torch.cat([each[name].flatten() for name in package]) for each in (own, package)]
    assert relative_gap(*flat) <= max(1e-5, GRADIENTS)


def test_the_wrong_answer_is_the_first_of_a_wrong_rollout(one_file: ModuleType) -> None:
    assert one_file.wrong_answer(["12", "7", None, "9"], [1.0, 0.0, 0.0, 0.0]) == "7"
    assert one_file.wrong_answer(["12", None], [1.0, 0.0]) is None


@pytest.mark.nightly("12 steps take half a minute")
def test_it_learns(one_file: ModuleType, loaded: tuple[Any, Any]) -> None:
    """Eight problems again and again: the share of right responses rises far above what chance explains."""
    model, processor = loaded
    torch.manual_seed(0)
    _, problems = one_file.embedded_world(8)
    settings = replace(one_file.Settings(), prompts=8, learning_rate=3e-4)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    curve = one_file.train(model, processor, problems, settings, steps=12)
    assert differing(before, dict(model.named_parameters()))
    assert sum(curve[-3:]) / 3 > sum(curve[:3]) / 3 + 0.15, curve
