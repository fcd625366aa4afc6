"""Whole training steps of every method against a second trainer that shares no code with `cepo`: the weights after the optimizer.

Two steps of two optimizer batches and two epochs on the same recorded responses, ragged and cut, behind no image, one and
two, in groups that are mixed, all right and all wrong, at temperature 1.3. Both sides compute in float32, in another order.
Then the gradient of the paper's method against the example in one file.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from actors import differing, distance
from generator_cases import picture
from reference_trainer.settings import Divergence, Problem, Response, Settings
from reference_trainer.training import ReferenceTrainer
from rounding import GRADIENTS
from torch import Tensor
from training_runs import (
    REPOSITORY,
    actor_of,
    around,
    opened,
    parameters_of,
    recorded_groups,
    relative_gap,
    write_pictured,
)

from cepo.algorithms import available_estimators
from cepo.microgeo.world import ASSETS
from cepo.rollout.generator import AdapterWeights, Generation, GenerationRequest, SamplingSettings
from cepo.trainer.batches import actor_batches
from cepo.trainer.loop import Trainer
from cepo.workers.worker import Worker
from testing.rows import gradients_of

pytestmark = pytest.mark.heavy
METHODS = available_estimators()


def said(text: str, answer: str | None = None, *, right: bool = False, cut: bool = False) -> Response:
    return Response(text if answer is None else rf"{text}\boxed{{{answer}}}", answer, right, cut)


PROBLEMS = (
    Problem(
        "Find x.",
        (picture(1),),
        "12",
        (
            (said("so ", "12", right=True), said("", "7"), said("then x is ", "9"), said("x is about", cut=True)),
            (said("x = ", "31"), said("", "12", right=True), said("half of it: ", "6"), said("", "12", right=True)),
        ),
        (said("", "12", right=True), said("", "8")),
    ),
    Problem(
        "Which share is it?",
        (picture(2, (96, 64)), picture(3)),
        r"\frac{1}{2}",
        (
            (said("", "3"), said("the half: ", "0.5", right=True), said("nothing"), said("4, ", "4", cut=True)),
            (said("a", cut=True), said("b"), said("", "0.5", right=True), said("the ratio is ", "2")),
        ),
        (said("no"), said("", "0.5", right=True)),
    ),
    Problem(
        "What is 2 + 3?",
        (),
        "5",
        (
            (said("", "6"), said("two and three", cut=True), said("I say ", "4"), said("", "23")),
            (said("", "6"), said("", "5", right=True), said("five"), said("it is ", "50")),
        ),
        (said("", "5", right=True), said("", "5", right=True)),
    ),
    Problem(
        "How many sides?",
        (picture(4),),
        "4",
        (
            (said("", "4", right=True), said("it has ", "4", right=True)) * 2,
            (said("sides: ", "4", right=True), said("", "5"), said("", "5"), said("", "5")),
        ),
        (said("", "4", right=True), said("", "4", right=True)),
    ),
)


IN_CEPOS_WORDS = {
    "loss": "worker.actor.loss_type",
    "aggregation": "worker.actor.loss_avg_mode",
    "gamma": "algorithm.gamma",
    "gae_lambda": "algorithm.lam",
    "mixing": "algorithm.weight.lambda_init",
    "mixing_steps": "algorithm.weight.lambda_decay_steps",
    "radius": "algorithm.weight.clip_radius",
    "threshold": "algorithm.contrast_gate.threshold",
    "floor": "algorithm.contrast_gate.floor",
    "baseline": "algorithm.advantage.baseline",
    "num_wrong": "algorithm.rlcsd.num_wrong",
    "right_source": "algorithm.positive.source",
    "wrong_source": "algorithm.negative.source",
    "exclude_self": "algorithm.positive.exclude_self",
    "teacher": "algorithm.teacher.source",
    "policy_weight": "algorithm.distillation.policy_weight",
}


def overrides_of(settings: Settings) -> list[str]:
    """What a case sets beside the defaults, in the configuration's words."""
    usual = Settings(method=settings.method)
    overrides = {
        key: getattr(settings, name)
        for name, key in IN_CEPOS_WORDS.items()
        if getattr(settings, name) != getattr(usual, name)
    }
    if settings.teacher == "ema":
        overrides["algorithm.teacher.ema_decay"] = settings.ema_decay
    if settings.lora is not None:
        overrides["worker.actor.model.lora.rank"], overrides["worker.actor.model.lora.alpha"] = settings.lora
    if settings.kl is not None:
        penalty, coefficient, place = settings.kl
        overrides |= {"algorithm.disable_kl": "false", "algorithm.use_kl_loss": place == "loss"}
        overrides |= {"algorithm.kl_penalty": penalty, "algorithm.kl_coef": coefficient}
    if settings.adaptive is not None:
        overrides["algorithm.kl_type"] = "adaptive"
        overrides["algorithm.kl_target"], overrides["algorithm.kl_horizon"] = settings.adaptive
    if settings.divergence is not None and settings.divergence.top is not None:
        section = "algorithm.distillation.divergence"
        overrides |= {f"{section}.support": "topk", f"{section}.topk": settings.divergence.top}
        overrides[f"{section}.importance_clip"] = settings.divergence.importance_clip
        overrides[f"{section}.entropy_beta"] = settings.divergence.entropy_beta
    if settings.method in ("vppo", "papo"):
        overrides[f"algorithm.{settings.method}.mask_probability"] = 1.0  # no patch is left to chance
    if settings.method == "contrast_gate":
        overrides["algorithm.weight.lambda_schedule"] = "linear"
    if settings.method == "rlcsd_released":
        overrides["algorithm.negative.select"] = "lowest_reward"
    return [f"{key}={value}" for key, value in overrides.items()]


_evidence = functools.partial(Settings, mixing=0.7, mixing_steps=4, radius=0.4)
_OF_PEERS: dict[str, Any] = {"right_source": "peer_full", "wrong_source": "peer_full"}
CASES = {
    "grpo, KL in the loss": Settings(method="grpo", kl=("low_var_kl", 0.5, "loss")),
    "grpo, LoRA, means of sequences": Settings(method="grpo", lora=(4, 8), aggregation="seq"),
    "rlsd": _evidence(method="rlsd"),
    "rlsd, averaged teacher, LoRA, one epoch": _evidence(method="rlsd", teacher="ema", lora=(4, 8), epochs=1),
    "cepo": _evidence(method="cepo"),
    "cepo, one epoch": _evidence(method="cepo", epochs=1),
    "cepo, LoRA, whole responses, initial teacher, KL in the reward": _evidence(
        method="cepo", lora=(4, 8), teacher="reference", kl=("kl", 0.2, "reward"), **_OF_PEERS
    ),
    "cepo, baseline of evidence, one epoch": _evidence(method="cepo", baseline="hindsight", epochs=1),
    "contrast_gate": Settings(method="contrast_gate", mixing=0.7, mixing_steps=4, threshold=0.5, floor=0.2),
    "contrast_gate, whole responses, one epoch": Settings(method="contrast_gate", mixing=0.9, epochs=1, **_OF_PEERS),
    "hindsight, from a peer": Settings(method="hindsight", right_source="peer_answer", exclude_self=True),
    "rlcsd, two wrong references": _evidence(method="rlcsd", num_wrong=2),
    "rlcsd_released, initial teacher": Settings(
        method="rlcsd_released", teacher="reference", exclude_self=True, **_OF_PEERS
    ),
    "visual": _evidence(method="visual"),
    "input_contrast": _evidence(method="input_contrast"),
    "vppo": Settings(method="vppo"),
    "papo": Settings(method="papo"),
    "pgpo": Settings(method="pgpo"),
    "opsd": Settings(method="opsd", divergence=Divergence(kind="forward_kl")),
    "sdpo, top 20 from a peer, beside the reward": Settings(
        method="sdpo",
        divergence=Divergence(kind="jsd", top=20, importance_clip=1.1),
        right_source="peer_full",
        exclude_self=True,
        teacher="ema",
        policy_weight=0.5,
    ),
    "srpo, top 20": Settings(
        method="srpo",
        divergence=Divergence(kind="jsd", top=20, importance_clip=1.1, entropy_beta=1.0),
        right_source="peer_full",
        teacher="ema",
        policy_weight=1.0,
    ),
    "rloo, ratios of sequences, constant length": Settings(method="rloo", loss="gspo", aggregation="constant"),
    "remax, cispo": Settings(method="remax", loss="cispo"),
    "reinforce_plus_plus, moving KL in the reward": Settings(
        method="reinforce_plus_plus", gamma=0.9, kl=("low_var_kl", 0.3, "reward"), adaptive=(0.1, 64.0)
    ),
    "gae": Settings(method="gae", gamma=0.95, gae_lambda=0.9),
    "grpo_passk, sapo, sums of sequences": Settings(method="grpo_passk", loss="sapo", aggregation="seq_sum"),
}


def test_every_registered_method_is_held_to_the_second_trainer() -> None:
    assert {settings.method for settings in CASES.values()} == set(METHODS)


@pytest.fixture(scope="module")
def recorded_problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [(problem.images, problem.question, problem.truth) for problem in PROBLEMS]
    return write_pictured(tmp_path_factory.mktemp("recorded") / "problems.parquet", rows)


def arguments(settings: Settings, problems: Path) -> list[str]:
    clip = zip(("low", "high", "dual"), settings.clip, strict=True)
    return [
        f"data.train_files={problems}",
        "data.format_prompt=null",
        "data.shuffle=false",
        f"data.max_response_length={settings.longest_response}",
        f"data.rollout_batch_size={len(PROBLEMS)}",
        f"algorithm.adv_estimator={settings.method}",
        f"worker.actor.global_batch_size={settings.prompts_per_update}",
        "worker.actor.micro_batch_size_per_device_for_update=3",
        "worker.actor.micro_batch_size_per_device_for_experience=5",
        f"worker.actor.ppo_epochs={settings.epochs}",
        *(f"worker.actor.clip_ratio_{name}={value}" for name, value in clip),
        f"worker.actor.optim.lr={settings.learning_rate}",
        "worker.actor.optim.lr_scheduler_type=cosine",
        f"worker.critic.optim.lr={settings.critic_learning_rate}",
        f"worker.critic.optim.betas={list(settings.betas)}",
        "worker.critic.micro_batch_size_per_device_for_update=8",
        f"worker.rollout.temperature={settings.temperature}",
        "worker.reward.reward_function=null",
        "worker.reward.reward_function_kwargs.format_weight=0.1",
        f"trainer.max_steps={settings.horizon}",
        *overrides_of(settings),
    ]


def replay(
    trainer: Trainer, _: Any, requests: Sequence[GenerationRequest], settings: SamplingSettings, on_finished: Any = None
) -> list[list[Generation]]:
    """In place of what the engine would sample come the recorded responses, step after step."""
    del on_finished
    assert len(requests) == len(PROBLEMS)
    step = trainer.state.step
    processing = trainer.processing

    def generation(response: Response) -> Generation:
        end = () if response.cut else (processing.eos_token_ids[0],)
        ids = (*processing.encode_text(response.text), *end)
        return Generation.of(ids, [0.0] * len(ids), finished=not response.cut)

    groups: list[list[Generation]] = []
    for problem in PROBLEMS:
        responses = [problem.greedy[step]] if settings.temperature == 0 else problem.responses[step]
        groups.append([generation(response) for response in responses])
    return groups


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    """The adapter's, if there is one, and else all of the actor's, under the model's own names."""
    served = actor_of(trainer).rollout_weights()
    if isinstance(served, AdapterWeights):
        return {name.removeprefix("base_model.model."): tensor.clone() for name, tensor in served.tensors.items()}
    return {name.removeprefix("model."): value for name, value in parameters_of(actor_of(trainer)).items()}


MORE_OF_THE_SAME = (
    "grpo, LoRA, means of sequences",
    "rlsd, averaged teacher, LoRA, one epoch",
    "cepo, one epoch",
    "cepo, baseline of evidence, one epoch",
    "contrast_gate, whole responses, one epoch",
)
"""Second settings of a method: adapters, averages and baselines have tests of their own, and every method has a case."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly("second settings") if name in MORE_OF_THE_SAME else ())
        for name in CASES
    ],
)
def test_two_steps_end_with_the_weights_of_the_second_trainer(
    name: str, recorded_problems: Path, tiny_model_folder: Path, tiny_run: list[str], tmp_path: Path
) -> None:
    settings = CASES[name]
    with opened(tiny_run, *arguments(settings, recorded_problems), folder=tmp_path) as trainer:
        assert isinstance(trainer.backend, Worker)
        around("backend.generate", replay)(trainer)
        initial = weights_of(trainer)
        critic = trainer.backend.critic
        head = None
        if critic is not None:
            values = parameters_of(critic)
            head = values["head.weight"], values["head.bias"]
        for step in range(settings.steps):
            trainer.train_step(step)
        final = weights_of(trainer)
        values = {} if critic is None else parameters_of(critic)
    rollouts = recorded_groups(tmp_path)
    for step in range(settings.steps):
        rewards: dict[str, list[float]] = {}
        for group in rollouts:
            if group["step"] == step + 1:
                rewards[group["prompt_id"]] = [rollout["reward"] for rollout in group["rollouts"]]
        for number, problem in enumerate(PROBLEMS):
            expected_rewards = [response.reward for response in problem.responses[step]]
            assert rewards[str(number)] == pytest.approx(expected_rewards)
    adapter = None if settings.lora is None else initial
    second = ReferenceTrainer(tiny_model_folder, settings, PROBLEMS, adapter=adapter, critic_head=head)
    assert distance(final, second.train(), initial) < 2e-3
    if values:
        assert second.critic is not None
        head_weights = torch.cat([values["head.weight"].flatten(), values["head.bias"]])
        expected = torch.cat([second.critic.weight.flatten(), second.critic.bias]).detach()
        torch.testing.assert_close(head_weights, expected, atol=1e-4, rtol=1e-2)


ONE_FILE = REPOSITORY / "examples" / "cepo_in_one_file.py"


@pytest.fixture
def one_file(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ONE_FILE.parent)
    return importlib.import_module(ONE_FILE.stem)


def test_the_one_file_has_300_lines_and_needs_no_library() -> None:
    source = ONE_FILE.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 300
    imported = re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE)
    assert set(imported) - set(sys.stdlib_module_names) == {"torch", "transformers"}
    inner = re.findall(r"^ +(.* import .*)", source, re.MULTILINE)
    assert inner == ["from cepo.microgeo import SHAPES"], "the package gives the data alone"


def test_the_same_rollouts_give_the_packages_gradient(one_file: Any, tiny_run: list[str], tmp_path: Path) -> None:
    overrides = [
        "algorithm.adv_estimator=cepo",
        f"worker.actor.model.model_path={ASSETS}",
        "worker.actor.global_batch_size=4",
        "worker.actor.loss_avg_mode=seq",
        "worker.reward.reward_function=null",
        "data.max_response_length=64",
    ]
    with opened(tiny_run, *overrides, folder=tmp_path) as trainer:
        rollouts = trainer.sample(0)
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
    problems: list[Any] = []
    for problem in rollouts.problems:
        question = problem.text.removeprefix("<image>").removesuffix(" Answer in \\boxed{}.")
        problems.append(one_file.Problem(problem.images[0], question, problem.ground_truth))
    responses = [generation.response_ids.tolist() for generation in rollouts.generations]
    credit = one_file.credit_of(model, processor, problems, responses, settings, step=0)
    torch.testing.assert_close(credit.rewards, rollouts.rewards, rtol=0, atol=0)
    assert torch.equal(credit.mask, rollouts.response_mask)
    torch.testing.assert_close(credit.advantages, signal.advantages, rtol=0, atol=1e-5)

    one_file.accumulate_gradient(model, processor, problems, responses, credit, settings)
    of_one_file = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    of_package = {name.removeprefix("model."): of_weight for name, of_weight in gradient.items()}
    assert set(of_package) <= set(of_one_file), sorted(set(of_package) - set(of_one_file))
    flat_of_one_file = torch.cat([of_one_file[name].flatten() for name in of_package])
    flat_of_package = torch.cat([of_package[name].flatten() for name in of_package])
    assert relative_gap(flat_of_one_file, flat_of_package) <= max(1e-5, GRADIENTS)


def test_the_wrong_answer_is_the_first_of_a_wrong_rollout(one_file: Any) -> None:
    assert one_file.wrong_answer(["12", "7", None, "9"], [1.0, 0.0, 0.0, 0.0]) == "7"
    assert one_file.wrong_answer(["12", None], [1.0, 0.0]) is None


@pytest.mark.nightly("12 steps take half a minute")
def test_the_one_file_learns(one_file: Any) -> None:
    """Eight problems again and again: the share of right responses rises far above what chance explains."""
    model, processor = one_file.load(str(ASSETS))
    torch.manual_seed(0)
    _, problems = one_file.embedded_world(8)
    settings = replace(one_file.Settings(), prompts=8, learning_rate=3e-4)
    initial_weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    curve = one_file.train(model, processor, problems, settings, steps=12)
    assert differing(initial_weights, dict(model.named_parameters()))
    assert sum(curve[-3:]) / 3 > sum(curve[:3]) / 3 + 0.15, curve
