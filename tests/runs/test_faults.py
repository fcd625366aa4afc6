"""Faults of a step end the run or cost the step; bad input ends it before a model is loaded; bad rewards cost one sample."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from actors import differing
from generator_cases import picture
from json_files import read_lines, write_lines
from safetensors.torch import load_file
from training_runs import (
    ONE_STEP,
    TWO_TEACHERS,
    Prepare,
    Train,
    actor_of,
    around,
    checked_config,
    parameters_of,
)

import cepo.train
from cepo.data.dataset import ProblemSet
from cepo.errors import ConfigError, DataError, EngineError
from cepo.models.processing import Processing
from cepo.rollout.generator import Generation
from cepo.trainer.batches import ScoredBatch
from cepo.trainer.loop import Trainer
from cepo.types import TokenSignal

pytestmark = pytest.mark.heavy


def in_steps(first: int, last: int, name: str, spoil: Callable[[Any], None]) -> Prepare:
    """Spoils what the trainer's method `name` returns in these 1-based steps."""

    def planted(trainer: Trainer, plain: Any, *arguments: Any) -> Any:
        result = plain(*arguments)
        if first <= trainer.state.step + 1 <= last:
            spoil(result)
        return result

    return around(name, planted)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*_step_*"))


def nan_teacher(batch: ScoredBatch) -> None:
    for values in batch.teacher_log_probs.values():
        values[1, 0] = torch.nan


def infinite_reward(batch: ScoredBatch) -> None:
    batch.token_level_rewards[0, 0] = torch.inf


def nan_advantages(signal: TokenSignal) -> None:
    signal.advantages.fill_(torch.nan)


PLANTED = {
    2: ("estimate", nan_advantages, "advantages", None),
    3: ("score", infinite_reward, "rewards", 1),
    4: ("score", nan_teacher, "log_probs", 1),
}
"""By step; advantages come first, because the others leave some that are not finite, and nothing is said twice."""


def test_a_step_with_broken_numbers_is_left_out_if_asked(train: Train, caplog: pytest.LogCaptureFixture) -> None:
    """Steps 2 to 4 of 5 are planted with them, and the weights after these steps are those before."""
    seen: dict[int, Any] = {}

    def look(trainer: Trainer, record: Any, *arguments: Any) -> None:
        seen[trainer.state.step] = parameters_of(actor_of(trainer))
        record(*arguments)

    def prepare(trainer: Trainer) -> None:
        for step, (method, spoil, *_) in PLANTED.items():
            in_steps(step, step, method, spoil)(trainer)
        around("record", look)(trainer)

    options = ["trainer.max_steps=5", "trainer.on_fault=skip", "trainer.max_skipped_steps=-1"]
    finished = train(*TWO_TEACHERS, *options, prepare=prepare)
    assert [row["actor/skipped_updates"] for row in finished.metrics] == [0, 1, 1, 1, 0]
    for planted, (_, _, name, count) in PLANTED.items():
        counts = {row["step"]: row[f"health/nonfinite_{name}"] for row in finished.metrics}
        assert counts[1] == 0
        assert counts[5] == 0
        assert counts[planted] == count if count else counts[planted] > 100
        said = f"step {planted}: {counts[planted]:g} {name.replace('_', '-')} are not finite (trainer.on_fault=skip)"
        assert said in caplog.text
        assert differing(seen[1], seen[planted]) == []
    assert differing(seen[4], seen[5]) != []


def drifting(trainer: Trainer, generate: Any, requests: Any, settings: Any, _: Any = None) -> list[list[Generation]]:
    """The engine's log-probs are off by 3 nats from step 2 on."""
    off = 3.0 * (trainer.state.step > 0)

    def drifted(generation: Generation) -> Generation:
        log_probs = tuple(value - off for value in generation.log_probs)
        return dataclasses.replace(generation, log_probs=log_probs)

    groups: list[list[Generation]] = generate(requests, settings)
    return [list(map(drifted, group)) for group in groups]


def endless_momentum(actor: Any) -> None:
    """The next step moves all weights to infinity."""
    for state in actor.optimizer.state.values():
        state["exp_avg"].fill_(torch.inf)


def broken_weights(actor: Any) -> None:
    """The update's log-probs of finite inputs are NaN, and the update is skipped."""
    with torch.no_grad():
        for parameter in actor.module.parameters():
            parameter.mul_(1e30)


def before_update(plant: Callable[[Any], None]) -> Prepare:
    def planted(trainer: Trainer, update: Any, *arguments: Any) -> Any:
        if trainer.state.step == 1:
            plant(actor_of(trainer))
        return update(*arguments)

    return around("update", planted)


BROKEN = "not finite, so the model is broken.*optim\\.lr"


@pytest.mark.parametrize(
    ("policy", "prepare", "said"),
    [
        ("stop", in_steps(2, 2, "estimate", nan_advantages), r"\d+ advantages are not finite \(trainer\.on_fault=stop"),
        ("stop", around("backend.generate", drifting), "differ by 3 nats a token .*max_log_prob_gap=1"),
        # Whatever trainer.on_fault says:
        ("warn", before_update(endless_momentum), f"actor/weight_norm.* {BROKEN}"),
        ("warn", before_update(broken_weights), f"actor/pg_loss.* {BROKEN}"),
    ],
)
def test_a_fault_that_ends_the_run_leaves_the_checkpoint_before(
    train: Train, tmp_path: Path, policy: str, prepare: Prepare, said: str
) -> None:
    """At the run's last step too."""
    options = ["trainer.max_steps=2", "trainer.save_freq=1", f"trainer.on_fault={policy}"]
    with pytest.raises(EngineError, match=f"step 2: .*{said}"):
        train(*options, prepare=prepare)
    assert names(tmp_path / "run") == ["global_step_1"]
    assert [row["step"] for row in read_lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize(("kind", "words"), [("repeated", "repeat one token"), ("empty", "are empty")])
def test_collapsed_responses_are_named_after_some_steps(
    train: Train, caplog: pytest.LogCaptureFixture, kind: str, words: str
) -> None:
    """Every response is one token many times, or nothing but its end."""

    def collapsed(trainer: Trainer, generate: Any, requests: Any, settings: Any, _: Any = None) -> Any:
        ids = (65,) * 10 if kind == "repeated" else (trainer.processing.eos_token_ids[0],)
        response = Generation.of(ids, [-1.0] * len(ids), finished=kind == "empty")
        return [[response] * len(group) for group in generate(requests, settings)]

    options = ["trainer.max_steps=3", "trainer.collapse_steps=2"]
    finished = train(*options, prepare=around("backend.generate", collapsed))
    assert [row[f"health/{kind}_fraction"] for row in finished.metrics] == [1, 1, 1]
    assert [row["health/equal_reward_steps"] for row in finished.metrics] == [1, 2, 3]
    messages = [record.getMessage() for record in caplog.records]
    told = [message for message in messages if "in a row" in message]
    assert len(told) == 2
    assert all(message.startswith("step 2:") for message in told)
    assert any(f"at least half of the responses of 2 steps in a row {words}" in message for message in told)
    assert any("all responses of 2 steps in a row got the same reward" in message for message in told)


def test_skipped_steps_are_saved_at_the_end_of_the_run_alone(train: Train, tmp_path: Path) -> None:
    train("trainer.max_steps=3", "trainer.save_freq=1", prepare=in_steps(2, 3, "estimate", nan_advantages))
    assert names(tmp_path / "run") == ["global_step_1", "global_step_3"]


GOOD = {"images": ["good.png"], "problem": "<image>Find x.", "answer": "4"}


def write_rows(folder: Path, *changes: dict[str, Any]) -> Path:
    """A data file of good rows with these changes, beside pictures that are whole, cut short, thin and no pictures at all."""
    picture(1).save(folder / "good.png")
    picture(2, (400, 2)).resize((800, 2)).save(folder / "thin.png")
    (folder / "text.png").write_text("this is no picture")
    (folder / "cut.png").write_bytes((folder / "good.png").read_bytes()[:6000])
    return write_lines(folder / "problems.jsonl", (GOOD | change for change in changes))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"problem": "<image><image>Find x."}, ["2 '<image>'", "1 images"]),
        ({"images": ["text.png"]}, ["cannot be read", "text.png"]),
        ({"images": ["cut.png"]}, ["damaged"]),
        ({"images": ["thin.png"]}, ["800 x 2", "at most 200"]),
        ({"answer": None}, ["'answer' is empty"]),
        ({"problem": ""}, ["'problem' is empty"]),
    ],
)
def test_a_bad_row_is_named_or_left_out(
    tiny_run: list[str], tiny_processing: Processing, tmp_path: Path, change: dict[str, Any], words: list[str]
) -> None:
    file = write_rows(tmp_path, {}, {}, change, {})
    options = [*tiny_run, f"data.train_files={file}", f"data.image_dir={tmp_path}"]
    with pytest.raises(DataError) as refused:
        ProblemSet(str(file), checked_config(options).data, tiny_processing)
    for word in [*words, str(file), "row 2", "data.skip_bad_rows=true"]:
        assert word in str(refused.value)
    problems = ProblemSet(str(file), checked_config([*options, "data.skip_bad_rows=true"]).data, tiny_processing)
    assert problems.skipped == Counter(bad=1)
    assert [problem.prompt_id for problem in problems] == ["0", "1", "3"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([{}] * 4, ["algorithm.positive.source=solution", "no column 'solution'", "problem", "data.solution_key"]),
        ([{"solution": text} for text in ("x = 4.", None, " ", "so 4")], ["2 of 4 rows", "row 1;"]),
    ],
)
def test_missing_solutions_are_noticed_before_a_model_is_loaded(
    train: Train, no_model: None, tmp_path: Path, changes: list[dict[str, Any]], words: list[str]
) -> None:
    arguments = ["algorithm.adv_estimator=opsd", "algorithm.positive.source=solution", "data.prompt_key=problem"]
    with pytest.raises(ConfigError) as refused:
        train(*arguments, f"data.train_files={write_rows(tmp_path, *changes)}", f"data.image_dir={tmp_path}")
    assert [word for word in words if word not in str(refused.value)] == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_broken_weights_end_the_run_with_code_2(
    tiny_run: list[str], tiny_model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_folder, model, ignore=shutil.ignore_patterns("*.safetensors"))
    if name.endswith(".bin"):
        torch.save(load_file(tiny_model_folder / "model.safetensors"), model / name)
    else:
        shutil.copyfile(tiny_model_folder / name, model / name)
    (model / name).write_bytes((model / name).read_bytes()[:-1000])
    run_folder = f"trainer.save_checkpoint_path={tmp_path / 'run'}"
    assert cepo.train.main([*tiny_run, f"worker.actor.model.model_path={model}", run_folder]) == 2
    (error,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert f"worker.actor.model.model_path '{model}': its weights cannot be loaded (" in error
    assert "download the folder again" in error


def test_a_reward_that_raises_or_hangs_costs_its_own_samples(train: Train, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import time\n"
        "REWARD_TYPE = 'sequential'\n"
        "def score(sample):\n"
        "    if sample['id'] == 0:\n"
        "        raise RuntimeError('no score for problem 0')\n"
        "    if sample['id'] == 1:\n"
        "        time.sleep(600)\n"
        "    return {'overall': 1.0, 'accuracy': 1.0}\n"
    )
    options = [f"worker.reward.reward_function={reward}:score", "worker.reward.timeout_seconds=1", "worker.rollout.n=2"]
    finished = train(*options, "data.shuffle=false", ONE_STEP)
    metrics = finished.metrics[0]
    assert metrics["reward/num_raised"] == metrics["reward/num_timed_out"] == 2
    assert metrics["reward/mean"] == 0.5
    rewards: dict[str, list[float]] = {}
    for group in finished.rollouts:
        rewards[group["prompt_id"]] = [rollout["reward"] for rollout in group["rollouts"]]
    assert rewards == {"0": [0, 0], "1": [0, 0], "2": [1, 1], "3": [1, 1]}
