from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import TWO_TEACHERS, Train, actor_of, around, differing, json_lines, parameters_of

from cepo.errors import EngineError
from cepo.rollout.generator import Generation
from cepo.trainer.loop import Trainer
from cepo.trainer.planning import ScoredBatch
from cepo.types import TokenSignal

pytestmark = pytest.mark.heavy


def in_steps(first: int, last: int, name: str, change: Callable[[Any], Any]) -> Callable[[Trainer], None]:
    """Changes what the trainer's method `name` returns in these 1-based steps."""

    def planted(trainer: Trainer, plain: Any, *arguments: Any) -> Any:
        result = plain(*arguments)
        return change(result) if first <= trainer.state.step + 1 <= last else result

    return around(name, planted)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*_step_*"))


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
        for step, (method, change, *_) in PLANTED.items():
            in_steps(step, step, method, change)(trainer)
        around("record", look)(trainer)

    options = ["trainer.max_steps=5", "trainer.on_fault=skip", "trainer.max_skipped_steps=-1"]
    finished = train(*TWO_TEACHERS, *options, prepare=prepare)
    assert [row["actor/skipped_updates"] for row in finished.metrics] == [0, 1, 1, 1, 0]
    for planted, (_, _, name, count) in PLANTED.items():
        found = {row["step"]: row[f"health/nonfinite_{name}"] for row in finished.metrics}
        assert (found[1], found[5]) == (0, 0)
        assert found[planted] == count if count else found[planted] > 100
        said = f"step {planted}: {found[planted]:g} {name.replace('_', '-')} are not finite (trainer.on_fault=skip)"
        assert said in caplog.text
        assert differing(seen[1], seen[planted]) == []
    assert differing(seen[4], seen[5]) != []


def drifting(trainer: Trainer, generate: Any, requests: Any, settings: Any, _: Any = None) -> list[list[Generation]]:
    """The engine's log-probs are off by 3 nats from step 2 on."""
    off = 3.0 * (trainer.state.step > 0)
    return [
        [dataclasses.replace(one, log_probs=tuple(value - off for value in one.log_probs)) for one in group]
        for group in generate(requests, settings)
    ]


def endless_momentum(actor: Any) -> None:
    """The next step moves all weights to infinity."""
    for state in actor.optimizer.state.values():
        state["exp_avg"].fill_(torch.inf)


def broken_weights(actor: Any) -> None:
    """The update's log-probs of finite inputs are NaN, and the update is skipped."""
    with torch.no_grad():
        for parameter in actor.module.parameters():
            parameter.mul_(1e30)


def before_update(plant: Callable[[Any], None]) -> Callable[[Trainer], None]:
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
    train: Train, tmp_path: Path, policy: str, prepare: Callable[[Trainer], None], said: str
) -> None:
    """At the run's last step too."""
    options = ["trainer.max_steps=2", "trainer.save_freq=1", f"trainer.on_fault={policy}"]
    with pytest.raises(EngineError, match=f"step 2: .*{said}"):
        train(*options, prepare=prepare)
    assert names(tmp_path / "run") == ["global_step_1"]
    assert [row["step"] for row in json_lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize(("kind", "words"), [("repeated", "repeat one token"), ("empty", "are empty")])
def test_collapsed_responses_are_named_after_some_steps(
    train: Train, caplog: pytest.LogCaptureFixture, kind: str, words: str
) -> None:
    """Every response is one token many times, or nothing but its end."""

    def collapsed(trainer: Trainer, generate: Any, requests: Any, settings: Any, _: Any = None) -> Any:
        ids = (65,) * 10 if kind == "repeated" else (trainer.processing.eos_token_ids[0],)
        own = Generation(response_ids=ids, log_probs=(-1.0,) * len(ids), finished=kind == "empty")
        return [[own for _ in group] for group in generate(requests, settings)]

    options = ["trainer.max_steps=3", "trainer.collapse_steps=2"]
    finished = train(*options, prepare=around("backend.generate", collapsed))
    assert [row[f"health/{kind}_fraction"] for row in finished.metrics] == [1, 1, 1]
    assert [row["health/equal_reward_steps"] for row in finished.metrics] == [1, 2, 3]
    told = [record.getMessage() for record in caplog.records if "in a row" in record.getMessage()]
    assert sorted(text[:7] for text in told) == ["step 2:", "step 2:"]
    assert any(f"at least half of the responses of 2 steps in a row {words}" in text for text in told)
    assert any("all responses of 2 steps in a row got the same reward" in text for text in told)


def test_skipped_steps_are_saved_at_the_end_of_the_run_alone(train: Train, tmp_path: Path) -> None:
    train("trainer.max_steps=3", "trainer.save_freq=1", prepare=in_steps(2, 3, "estimate", nan_advantages))
    assert names(tmp_path / "run") == ["global_step_1", "global_step_3"]
