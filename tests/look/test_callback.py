"""The callback of a GRPOTrainer of TRL: it changes no weight, and writes the page with the contrast of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cepo.errors import ConfigError
from cepo.microgeo.world import ASSETS, SHAPES
from cepo.rewards.math import compute_score

trl = pytest.importorskip("trl", reason="the extra `trl` is not installed")
pytestmark = pytest.mark.heavy
GROUP = 8


def correct(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    rows = [{"response": text, "ground_truth": truth} for text, truth in zip(texts, answer, strict=True)]
    return [score["overall"] for score in compute_score(rows)]


def trainer_of(folder: Path, callbacks: list[Any], *, log_completions: bool = True, report_to: str = "none") -> Any:
    from datasets import Dataset

    drawn = [SHAPES.generate(0, index, stream="train") for index in range(16)]
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{each.question} Answer in \\boxed{{}}."}],
            "images": [SHAPES.draw(each)],
            "answer": each.answer,
        }
        for each in drawn
    ]
    arguments = trl.GRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, model_init_kwargs={"dtype": "float32"}, report_to=report_to,
        save_strategy="no", logging_steps=1, disable_tqdm=True, max_steps=4, learning_rate=1e-4,
        per_device_train_batch_size=16, num_generations=GROUP, max_completion_length=64, shuffle_dataset=False,
        log_completions=log_completions, num_completions_to_print=0,
    )  # fmt: skip
    return trl.GRPOTrainer(
        model=str(ASSETS),
        reward_funcs=correct,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        callbacks=callbacks,
    )


def test_weights_are_equal_to_the_bit_with_and_without_it(tmp_path: Path) -> None:
    """Four steps of TRL's own trainer, with a page after every second: no weight differs, and the page has the contrast."""
    from cepo.look.callback import CreditCallback

    callback = CreditCallback(every=2, responses=16)
    weights: list[dict[str, torch.Tensor]] = []
    for name, callbacks in (("without", []), ("with", [callback])):
        trainer = trainer_of(tmp_path / name, callbacks)
        trainer.train()
        weights.append({key: each.detach().clone() for key, each in trainer.model.named_parameters()})
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    page = (tmp_path / "with" / "look.html").read_text(encoding="utf-8")
    assert "The clearest pair, token by token" in page
    assert "nats of a right response" in page
    assert callback.seconds > 0
    assert not (tmp_path / "without" / "look.html").exists()


def test_figures_go_to_the_trackers_of_the_trainer(tmp_path: Path) -> None:
    """Of four steps with a page after each: three entries, of steps 1 to 3; TRL's own entries are as many as steps."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from cepo.look.callback import CreditCallback

    trainer = trainer_of(tmp_path, [], report_to="tensorboard")
    trainer.add_callback(CreditCallback(every=1, responses=8, trainer=trainer))
    trainer.train()
    (events,) = tmp_path.rglob("events.out.tfevents.*")
    entries = EventAccumulator(str(events)).Reload()
    assert [each.step for each in entries.Scalars("train/look/dead_groups")] == [1, 2, 3]
    seconds = [each.value for each in entries.Scalars("train/look/seconds")]
    assert 0 < seconds[0] < seconds[-1]
    assert "train/look/known_nats" in entries.Tags()["scalars"]
    assert [each.step for each in entries.Scalars("train/reward")] == [1, 2, 3, 4]


def test_a_trainer_that_does_not_log_its_completions_is_refused(tmp_path: Path) -> None:
    from cepo.look.callback import CreditCallback

    with pytest.raises(ConfigError, match="set log_completions=True in GRPOConfig"):
        trainer_of(tmp_path, [CreditCallback()], log_completions=False).train()
