"""Every preset file resolves to the values of the table that it stands for. The tables are written out here."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cepo.algorithms import build_estimator
from cepo.config import RunConfig, check_config, load_config
from cepo.config.loader import plain_tree
from cepo.trees import leaves

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))
METHODS = ("grpo", "rlsd", "cepo", "opsd", "sdpo")
PLACEHOLDER = object()

GROUP = {"advantage.ddof": 1, "advantage.scale": "std"}
LIVE_TEACHER = {
    "teacher.source": "actor",
    "teacher.sync_every": 1,
    "teacher.ema_decay": 0.999,
    "teacher.placement": "user_suffix",
    "teacher.template": None,
    "teacher.with_images": True,
    "teacher.max_reference_tokens": 64,
}
GROUND_TRUTH = {
    "positive.source": "ground_truth",
    "positive.num_tokens": 512,
    "positive.success_threshold": None,
    "positive.exclude_self": False,
}
EVIDENCE = {
    **GROUP,
    "advantage.reward_low": 0.0,
    "advantage.reward_high": 1.0,
    "advantage.lam": 1.0,
    "advantage.baseline": "group",
    "weight.lambda_init": 0.5,
    "weight.lambda_schedule": "linear",
    "weight.lambda_decay_steps": 25,
    "weight.lambda_warmup_steps": 0,
    "weight.clip_radius": 0.5,
    "weight.mixed_groups_only": False,
    **GROUND_TRUTH,
    **LIVE_TEACHER,
}
DISTILLATION = {
    **GROUP,
    "distillation.weight": 1.0,
    "distillation.policy_weight": 0.0,
    "distillation.divergence.kind": "forward_kl",
    "distillation.divergence.jsd_weight": 0.5,
    "distillation.divergence.support": "full",
    "distillation.divergence.topk": 100,
    "distillation.divergence.topk_from": "student",
    "distillation.divergence.clip": None,
    "distillation.divergence.clip_mode": "token",
    "distillation.divergence.importance_clip": None,
    **GROUND_TRUTH,
    **LIVE_TEACHER,
}
PAPER: dict[str, dict[str, Any]] = {
    "grpo": GROUP,
    "rlsd": EVIDENCE,
    "cepo": EVIDENCE
    | {
        "negative.source": "peer_answer",
        "negative.num_tokens": 512,
        "negative.select": "lowest_reward",
        "negative.strict_lowest": False,
        "negative.fallback": "student",
    },
    "opsd": DISTILLATION,
    "sdpo": DISTILLATION | {"distillation.divergence.kind": "jsd", "teacher.source": "ema"},
}
"""The paper's comparison: all settings that each method reads."""

PAPERS_SETTING: dict[str, Any] = {
    "data.train_files": "hiyouga/geometry3k@train",
    "data.rollout_batch_size": 32,
    "data.max_response_length": 2048,
    "algorithm.disable_kl": True,
    "worker.rollout.n": 8,
    "worker.rollout.temperature": 1.0,
    "worker.rollout.top_p": 1.0,
    "worker.rollout.top_k": -1,
    "worker.actor.global_batch_size": 32,
    "worker.actor.ppo_epochs": 1,
    "worker.actor.clip_ratio_low": 0.2,
    "worker.actor.clip_ratio_high": 0.28,
    "worker.actor.clip_ratio_dual": 3.0,
    "worker.actor.loss_avg_mode": "seq",
    "worker.actor.model.model_path": "Qwen/Qwen3-VL-2B-Instruct",
    "worker.actor.model.lora.rank": 16,
    "worker.actor.model.lora.alpha": 32,
    "worker.actor.model.lora.exclude_modules": ".*visual.*",
    "worker.actor.optim.strategy": "adamw",
    "worker.actor.optim.lr_scheduler_type": "cosine",
    "worker.actor.optim.lr_warmup_steps": 5,
    "worker.reward.reward_function_kwargs": {},
    "trainer.max_steps": 50,
}
"""SPEC of the paper's run, the same for all five; cepo's learning rate alone differs."""

OWN_PAPER: dict[str, dict[str, Any]] = {
    "rlsd": {
        "weight.clip_radius": 0.2,
        "weight.lambda_decay_steps": 50,
        "teacher.source": "snapshot",
        "teacher.sync_every": 10,
    },
    "opsd": {
        "distillation.divergence.clip": 0.05,
        "distillation.divergence.clip_mode": "vocab_entry",
        "positive.source": "solution_or_answer",
        "positive.num_tokens": 2048,
        "teacher.source": "reference",
    },
    "sdpo": {
        "distillation.divergence.support": "topk",
        "distillation.divergence.importance_clip": 2.0,
        "positive.source": "peer_full",
        "positive.exclude_self": True,
        "teacher.ema_decay": 0.95,
    },
}
"""Differences of each method's own paper from the paper's comparison."""

WHOLE_RESPONSE = {"data.max_prompt_length": 3136}
SLICE = {"data.max_prompt_length": 1600}


def sources(positive: str, negative: str) -> dict[str, Any]:
    chosen = {"algorithm.positive.source": positive, "algorithm.negative.source": negative}
    defaults = {"algorithm.positive.source": "ground_truth", "algorithm.negative.source": "peer_answer"}
    return {key: value for key, value in chosen.items() if value != defaults[key]}


ABLATIONS: dict[str, dict[str, Any]] = {
    "teacher_reference": {"algorithm.teacher.source": "reference"},
    "teacher_snapshot_25": {"algorithm.teacher.source": "snapshot", "algorithm.teacher.sync_every": 25},
    "teacher_actor": {},
    "feedback_peer_prefix": sources("peer_prefix", "peer_prefix") | SLICE,
    "feedback_peer_suffix": sources("peer_suffix", "peer_suffix") | SLICE,
    "feedback_peer_full": sources("peer_full", "peer_full") | WHOLE_RESPONSE,
    "feedback_ground_truth_peer_full": sources("ground_truth", "peer_full") | WHOLE_RESPONSE,
    "feedback_ground_truth_peer_answer": {},
    "lambda_constant_0.5": {"algorithm.weight.lambda_schedule": "constant"},
    "lambda_constant_1.0": {"algorithm.weight.lambda_schedule": "constant", "algorithm.weight.lambda_init": 1.0},
    "lambda_linear_1.0_over_10": {"algorithm.weight.lambda_init": 1.0, "algorithm.weight.lambda_decay_steps": 10},
    "lambda_linear_1.0_over_25": {"algorithm.weight.lambda_init": 1.0},
    "lambda_linear_1.0_over_50": {"algorithm.weight.lambda_init": 1.0, "algorithm.weight.lambda_decay_steps": 50},
    "clip_radius_0.1": {"algorithm.weight.clip_radius": 0.1},
    "clip_radius_0.2": {"algorithm.weight.clip_radius": 0.2},
    "clip_radius_0.3": {"algorithm.weight.clip_radius": 0.3},
    "clip_radius_0.4": {"algorithm.weight.clip_radius": 0.4},
    "clip_radius_0.5": {},
    "clip_radius_0.6": {"algorithm.weight.clip_radius": 0.6},
    "clip_radius_0.8": {"algorithm.weight.clip_radius": 0.8},
    "group_size_16": {"worker.rollout.n": 16},
}
"""Differences of each ablation from cepo's own file; none for the row that is the main setting."""

RELEASED_CODE: dict[str, Any] = {
    "data.max_prompt_length": 768,
    "data.min_pixels": 262144,
    "data.max_pixels": 4194304,
    "algorithm.weight.clip_radius": 0.2,
    "algorithm.negative.strict_lowest": True,
    "algorithm.teacher.placement": "assistant_prefix",
    "algorithm.teacher.template": "configs/teacher/released_code.jinja",
    "algorithm.teacher.with_images": False,
    "worker.actor.global_batch_size": 16,
    "worker.actor.loss_avg_mode": "token",
    "worker.actor.model.lora.alpha": 64,
    "worker.actor.optim.lr_scheduler_type": "constant",
    "worker.actor.optim.lr_warmup_steps": 0,
    "worker.reward.reward_function_kwargs.format_weight": 0.1,
}


@cache
def loaded(file: str | Path, *overrides: str) -> RunConfig:
    return load_config([f"config={CONFIGS / file}", *overrides])


@cache
def resolved(file: str, *overrides: str) -> dict[str, Any]:
    """All settings by their dotted keys. Read only."""
    return dict(leaves(plain_tree(loaded(file, *overrides))))


def section(method: str, file: str, *overrides: str) -> dict[str, Any]:
    """All settings that the method reads."""
    return dict(leaves(loaded(file, *overrides).methods[method]))


def difference(file: str, base: str) -> dict[str, Any]:
    """What `file` sets differently from `base`, the run's name left out."""
    run, before = resolved(file), resolved(base)
    keys = {key for key in run if run[key] != before.get(key, PLACEHOLDER)} - {"trainer.experiment_name"}
    return {key: run[key] for key in keys}


def ids(file: Path) -> str:
    return str(file.relative_to(CONFIGS).with_suffix(""))


@pytest.mark.heavy
@pytest.mark.parametrize("file", FILES, ids=ids)
def test_every_shipped_file_passes_the_checks(file: Path) -> None:
    responses = 16 if file.stem == "group_size_16" else 8
    assert f"samples per step: 32 prompts x {responses} responses = {32 * responses}" in check_config(loaded(file))


def test_50_runs_are_shipped_and_no_two_share_a_folder() -> None:
    runs = [file for file in FILES if file.stem != "base"]
    names = [loaded(file).trainer.experiment_name for file in runs]
    assert len(set(names)) == len(runs) == 15 + 3 + 1 + 10 + 21


@pytest.mark.parametrize("method", METHODS)
def test_a_methods_file_or_its_name_alone_gives_the_papers_table(method: str) -> None:
    """Whatever else a file may set is held by tests/config/test_config_files.py."""
    for world in ("microgeo", "geo3k"):
        assert section(method, f"{world}/{method}.yaml") == PAPER[method]
    assert section(method, "geo3k/base.yaml", f"algorithm.adv_estimator={method}") == PAPER[method]
    run = resolved(f"geo3k/{method}.yaml")
    assert {key: run[key] for key in PAPERS_SETTING} == PAPERS_SETTING
    assert run["worker.actor.optim.lr"] == (5e-6 if method == "cepo" else 1e-6)


@pytest.mark.parametrize("method", OWN_PAPER)
def test_an_own_paper_file_resolves_to_its_methods_own_table(method: str) -> None:
    file = f"geo3k/own_paper/{method}.yaml"
    assert section(method, file) == PAPER[method] | OWN_PAPER[method]
    expected = {f"algorithm.{key}": value for key, value in OWN_PAPER[method].items()}
    room = {} if method == "rlsd" else WHOLE_RESPONSE
    assert difference(file, f"geo3k/{method}.yaml") == expected | room


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rate", ["1e-6", "5e-6"])
def test_equal_lr_files_change_the_learning_rate_alone(rate: str, method: str) -> None:
    file = f"geo3k/equal_lr/{rate}/{method}.yaml"
    assert resolved(file)["worker.actor.optim.lr"] == float(rate)
    assert set(difference(file, f"geo3k/{method}.yaml")) <= {"worker.actor.optim.lr"}


def test_each_of_21_ablations_changes_what_its_row_says_alone() -> None:
    files = (CONFIGS / "geo3k" / "ablations").glob("*.yaml")
    found = {file.stem: difference(str(file.relative_to(CONFIGS)), "geo3k/cepo.yaml") for file in files}
    assert found == ABLATIONS


def test_the_snapshot_ablation_is_refreshed_when_lambda_is_0() -> None:
    """The paper's own settings: the update of the 1-based step 25 is the first after which the snapshot differs."""
    method: Any = build_estimator("cepo", loaded("geo3k/ablations/teacher_snapshot_25.yaml").methods["cepo"])
    assert method.config.teacher.sync_every == 25
    assert [method.mixing(step) for step in (24, 25)] == [pytest.approx(0.02), 0.0]


def test_contexts_of_peer_ablations_hold_question_and_reference() -> None:
    question = resolved("geo3k/base.yaml")["data.max_prompt_length"]
    for name, reference in (("peer_prefix", 512), ("peer_suffix", 512), ("peer_full", 2048)):
        run = resolved(f"geo3k/ablations/feedback_{name}.yaml")
        assert run["data.max_prompt_length"] >= question + reference + 64
        longest = run["data.max_prompt_length"] + run["data.max_response_length"]
        assert run["worker.rollout.max_num_batched_tokens"] >= longest


def test_the_released_code_is_what_the_authors_repository_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    changed = difference("geo3k/released_code.yaml", "geo3k/cepo.yaml")
    assert changed == RELEASED_CODE
    plan = check_config(load_config(["config=configs/geo3k/released_code.yaml"]))
    assert any(line.startswith("optimizer updates per step: 2, each over 128 samples") for line in plan)
    assert "trained weights: LoRA, rank 16, scale 4" in plan
    assert resolved("geo3k/released_code.yaml")["data.max_response_length"] == 2048


def test_the_released_codes_reference_precedes_the_response() -> None:
    from cepo.data.contexts import HintTemplate

    template = HintTemplate("assistant_prefix", str(CONFIGS / "teacher" / "released_code.jinja"))
    assert template.render(prompt="Find x.", reference="70") == " 70"


def test_the_readme_names_every_file_or_its_folder() -> None:
    text = (CONFIGS / "README.md").read_text(encoding="utf-8")
    grouped = {"ablations", "1e-6", "5e-6"}
    for file in FILES:
        name = file.parent.name if file.parent.name in grouped else f"{file.parent.name}/{file.name}"
        assert name in text, name
