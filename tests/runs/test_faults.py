"""Numbers that are not finite and collapse are named, counted, and met as `trainer.on_fault` says; each is planted here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import EVERY_WRONG_ROLLOUT_TEACHES, FinishedRun, actor_of, differing, json_lines, parameters_of, run

from cepo.errors import EngineError
from cepo.rollout.generator import Generation
from cepo.trainer.loop import Trainer
from cepo.trainer.scoring import ScoredBatch
from cepo.types import TokenSignal

pytestmark = pytest.mark.heavy

TEACHERS = ["algorithm.adv_estimator=cepo", EVERY_WRONG_ROLLOUT_TEACHES]


def in_step(step: int, name: str, change: Callable[[Any], Any]) -> Callable[[Trainer], None]:
    """Changes what the trainer's method `name` returns in the 1-based `step` alone."""

    def prepare(trainer: Trainer) -> None:
        plain = getattr(trainer, name)

        def planted(*arguments: Any) -> Any:
            result = plain(*arguments)
            return change(result) if trainer.state.step == step - 1 else result

        setattr(trainer, name, planted)

    return prepare


def nan_teacher(batch: ScoredBatch) -> ScoredBatch:
    broken = {view: values.clone() for view, values in batch.teacher_log_probs.items()}
    for values in broken.values():
        values[1, 0] = torch.nan
    return dataclasses.replace(batch, teacher_log_probs=broken)


def infinite_reward(batch: ScoredBatch) -> ScoredBatch:
    rewards = batch.token_level_rewards.clone()
    rewards[0, 0] = torch.inf
    return dataclasses.replace(batch, token_level_rewards=rewards)


def nan_advantages(signal: TokenSignal) -> TokenSignal:
    return dataclasses.replace(signal, advantages=torch.full_like(signal.advantages, torch.nan))


PLANTED = {
    "log_probs": ("score", nan_teacher, 1),
    "rewards": ("score", infinite_reward, 1),
    "advantages": ("estimate", nan_advantages, None),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_step_with_broken_numbers_is_left_out_if_asked(
    tiny_run: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Step 2 of 3 is planted with it, and the weights after it are those before it."""
    method, change, count = PLANTED[name]
    seen: dict[int, Any] = {}

    def prepare(trainer: Trainer) -> None:
        in_step(2, method, change)(trainer)
        record = trainer.record

        def look(*arguments: Any) -> None:
            seen[trainer.state.step] = {key: value.clone() for key, value in parameters_of(actor_of(trainer)).items()}
            record(*arguments)

        trainer.record = look  # type: ignore[method-assign]

    options = [*TEACHERS, "trainer.max_steps=3", "trainer.on_fault=skip"]
    finished = run(tiny_run, *options, folder=tmp_path, prepare=prepare)
    rows = [row[f"health/nonfinite_{name}"] for row in finished.metrics]
    assert (rows[0], rows[2]) == (0, 0)
    assert rows[1] == count if count else rows[1] > 100
    assert [row["actor/skipped_updates"] for row in finished.metrics] == [0, 1, 0]
    assert differing(seen[1], seen[2]) == []
    assert differing(seen[2], seen[3]) != []
    assert f"step 2: {rows[1]:g} {name.replace('_', '-')} are not finite (trainer.on_fault=skip)" in caplog.text


def test_a_broken_step_ends_the_run_if_asked(tiny_run: list[str], tmp_path: Path) -> None:
    options = ["trainer.max_steps=3", "trainer.save_freq=1", "trainer.on_fault=stop"]
    with pytest.raises(EngineError, match=r"step 2: \d+ advantages are not finite \(trainer\.on_fault=stop"):
        run(tiny_run, *options, folder=tmp_path, prepare=in_step(2, "estimate", nan_advantages))
    assert [row["step"] for row in json_lines(tmp_path / "metrics.jsonl")] == [1, 2]
    assert [path.name for path in tmp_path.glob("*_step_*")] == ["global_step_1"]


def collapsed(kind: str) -> Callable[[Trainer], None]:
    """Every response is one token many times, or nothing but its end."""

    def prepare(trainer: Trainer) -> None:
        generate = trainer.backend.generate

        def planted(*arguments: Any, **keywords: Any) -> list[list[Generation]]:
            groups = generate(*arguments[:2])
            ids = (65,) * 10 if kind == "repeated" else (trainer.processing.eos_token_ids[0],)
            own = Generation(response_ids=ids, log_probs=(-1.0,) * len(ids), finished=kind == "empty")
            return [[own for _ in group] for group in groups]

        trainer.backend.generate = planted  # type: ignore[method-assign]

    return prepare


def test_collapsed_responses_are_named_after_some_steps(
    tiny_run: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for kind, words in (("repeated", "repeat one token"), ("empty", "are empty")):
        caplog.clear()
        options = ["trainer.max_steps=3", "trainer.collapse_steps=2"]
        finished = run(tiny_run, *options, folder=tmp_path / kind, prepare=collapsed(kind))
        assert [row[f"health/{kind}_fraction"] for row in finished.metrics] == [1, 1, 1]
        assert [row["health/equal_reward_steps"] for row in finished.metrics] == [1, 2, 3]
        told = [record.getMessage() for record in caplog.records if "in a row" in record.getMessage()]
        assert sorted(text[:7] for text in told) == ["step 2:", "step 2:"]
        assert any(f"at least half of the responses of 2 steps in a row {words}" in text for text in told)
        assert any("all responses of 2 steps in a row got the same reward" in text for text in told)


def test_an_exploding_engine_gap_ends_the_run_if_asked(tiny_run: list[str], tmp_path: Path) -> None:
    """The engine's log-probs are off by 3 nats from step 2 on."""

    def drifting(trainer: Trainer) -> None:
        generate = trainer.backend.generate

        def planted(*arguments: Any, **keywords: Any) -> list[list[Generation]]:
            off = 3.0 * (trainer.state.step > 0)
            groups = generate(*arguments[:2])
            return [
                [dataclasses.replace(one, log_probs=tuple(value - off for value in one.log_probs)) for one in group]
                for group in groups
            ]

        trainer.backend.generate = planted  # type: ignore[method-assign]

    options = ["trainer.max_steps=3", "trainer.save_freq=1", "trainer.on_fault=stop"]
    with pytest.raises(EngineError, match=r"step 2: .* differ by 3 nats a token .*max_log_prob_gap=1"):
        run(tiny_run, *options, folder=tmp_path, prepare=drifting)
    assert [path.name for path in tmp_path.glob("*_step_*")] == ["global_step_1"]


def endless_momentum(actor: Any) -> None:
    """The next step moves all weights to infinity."""
    for state in actor.optimizer.state.values():
        state["exp_avg"].fill_(torch.inf)


def broken_weights(actor: Any) -> None:
    """The update's log-probs of finite inputs are NaN, and the update is skipped."""
    with torch.no_grad():
        for parameter in actor.module.parameters():
            parameter.mul_(1e30)


@pytest.mark.parametrize(
    ("plant", "said"), [(endless_momentum, "actor/weight_norm"), (broken_weights, "actor/pg_loss")]
)
def test_a_broken_model_ends_the_run_and_writes_no_checkpoint(
    tiny_run: list[str], tmp_path: Path, plant: Callable[[Any], None], said: str
) -> None:
    """Whatever `trainer.on_fault` says, and at the run's last step too."""

    def in_step_2(trainer: Trainer) -> None:
        update = trainer.update

        def planted(*arguments: Any) -> Any:
            if trainer.state.step == 1:
                plant(actor_of(trainer))
            return update(*arguments)

        trainer.update = planted  # type: ignore[method-assign]

    options = ["trainer.max_steps=2", "trainer.save_freq=1", "trainer.on_fault=warn"]
    with pytest.raises(EngineError, match=rf"step 2: .*{said}.* not finite, so the model is broken.*optim\.lr"):
        run(tiny_run, *options, folder=tmp_path, prepare=in_step_2)
    assert [path.name for path in tmp_path.glob("*_step_*")] == ["global_step_1"]
    assert [row["step"] for row in json_lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_last_step_that_trained_nothing_is_no_checkpoint(tiny_run: list[str], tmp_path: Path) -> None:

    def from_step_2(trainer: Trainer) -> None:
        estimate = trainer.estimate

        def broken(batch: ScoredBatch) -> TokenSignal:
            signal = estimate(batch)
            return signal if batch.rollouts.step == 0 else nan_advantages(signal)

        trainer.estimate = broken  # type: ignore[method-assign]

    options = ["trainer.max_steps=3", "trainer.save_freq=1"]
    with pytest.raises(EngineError, match=r"last 2 steps were skipped.*not finite.*untrained_step_3;"):
        run(tiny_run, *options, folder=tmp_path, prepare=from_step_2)
    assert sorted(path.name for path in tmp_path.glob("*_step_*")) == ["global_step_1", "untrained_step_3"]
    resumed: FinishedRun = run(tiny_run, *options, folder=tmp_path)
    assert resumed.first_step == 1
    assert [row["actor/skipped_updates"] for row in resumed.metrics] == [0, 0, 0]
