from __future__ import annotations

import importlib
import re
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import GRADIENTS
from training_runs import REPOSITORY, actor_of, checked_config, differing, parameters_of, relative_gap

from cepo.microgeo.world import ASSETS
from cepo.train import build_trainer
from cepo.trainer.planning import actor_batches
from lab.support.rows import gradients_of

pytestmark = pytest.mark.heavy
FILE = REPOSITORY / "examples" / "cepo_in_one_file.py"


@pytest.fixture
def one_file(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FILE.parent)
    return importlib.import_module(FILE.stem)


def test_it_has_300_lines_and_needs_no_further_library() -> None:
    source = FILE.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 300
    imported = re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE)
    assert set(imported) - set(sys.stdlib_module_names) == {"torch", "transformers"}
    inner = re.findall(r"^ +(.* import .*)", source, re.MULTILINE)
    assert inner == ["from cepo.microgeo.world import SHAPES"], "the package gives the data alone"


def test_the_same_rollouts_give_the_packages_gradient(one_file: Any, tiny_run: list[str], tmp_path: Path) -> None:
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
        gradient = dict(zip(parameters_of(actor), gradients_of(actor, update), strict=True))
    taught = plan.live & plan.views[1].has_reference
    assert taught.any(), "some group must be mixed, and have a wrong answer"

    model, processor = one_file.load(str(ASSETS))
    settings = replace(one_file.Settings(), group_size=4)
    questions = [each.text.removeprefix("<image>").removesuffix(" Answer in \\boxed{}.") for each in rollouts.problems]
    problems = [
        one_file.Problem(each.images[0], question, each.ground_truth)
        for each, question in zip(rollouts.problems, questions, strict=True)
    ]
    responses = [list(generation.response_ids) for generation in rollouts.generations]
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


def test_the_wrong_answer_is_the_first_of_a_wrong_rollout(one_file: Any) -> None:
    assert one_file.wrong_answer(["12", "7", None, "9"], [1.0, 0.0, 0.0, 0.0]) == "7"
    assert one_file.wrong_answer(["12", None], [1.0, 0.0]) is None


@pytest.mark.nightly("12 steps take half a minute")
def test_it_learns(one_file: Any) -> None:
    """Eight problems again and again: the share of right responses rises far above what chance explains."""
    model, processor = one_file.load(str(ASSETS))
    torch.manual_seed(0)
    _, problems = one_file.embedded_world(8)
    settings = replace(one_file.Settings(), prompts=8, learning_rate=3e-4)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    curve = one_file.train(model, processor, problems, settings, steps=12)
    assert differing(before, dict(model.named_parameters()))
    assert sum(curve[-3:]) / 3 > sum(curve[:3]) / 3 + 0.15, curve
