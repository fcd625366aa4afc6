"""The callback of a GRPOTrainer of TRL: it changes no weight, and writes the page with the contrast of tokens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from actors import differing
from reward_functions import of_completions
from run_folders import trackio_into, written

from cepo.errors import ConfigError
from cepo.microgeo.world import ASSETS, SHAPES

trl = pytest.importorskip("trl", reason="the extra `trl` is not installed")
pytestmark = pytest.mark.heavy
GROUP = 8


def trainer_of(
    folder: Path,
    callbacks: list[Any],
    *,
    log_completions: bool = True,
    report_to: str = "none",
    with_images: bool = True,
) -> Any:
    from datasets import Dataset

    drawn = [SHAPES.generate(0, index, stream="train") for index in range(16)]
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{problem.question} Answer in \\boxed{{}}."}],
            "images": [SHAPES.draw(problem)],
            "answer": problem.answer,
        }
        for problem in drawn
    ]
    if not with_images:
        for row in rows:
            del row["images"]
    arguments = trl.GRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, model_init_kwargs={"dtype": "float32"}, report_to=report_to,
        save_strategy="no", logging_steps=1, disable_tqdm=True, max_steps=4, learning_rate=1e-4,
        per_device_train_batch_size=16, num_generations=GROUP, max_completion_length=64, shuffle_dataset=False,
        log_completions=log_completions, num_completions_to_print=0,
    )  # fmt: skip
    return trl.GRPOTrainer(
        model=str(ASSETS),
        reward_funcs=of_completions,
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
        weights.append({key: parameter.detach().clone() for key, parameter in trainer.model.named_parameters()})
    assert differing(weights[0], weights[1]) == []
    page = (tmp_path / "with" / "look.html").read_text(encoding="utf-8")
    assert "The clearest pair, token by token" in page
    assert "nats of a right response" in page
    assert callback.seconds > 0
    assert not (tmp_path / "without" / "look.html").exists()


def in_tensorboard(folder: Path, name: str) -> list[float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = folder.rglob("events.out.tfevents.*")
    return [entry.value for entry in EventAccumulator(str(events)).Reload().Scalars(name)]


def in_wandb(folder: Path, name: str) -> list[float]:
    """The records of W&B's file of an offline run hold a name, then the tag of field 16, the length of its JSON, and the JSON.

    A record may be in parts: the file has blocks of 32 KiB, and a header of seven bytes before it and before each part.
    """
    import wandb  # pyright: ignore[reportMissingImports]

    wandb.finish()  # transformers leaves the run open until the process ends
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    content = written(file, b"train_runtime")
    parts: list[bytes] = []
    place = 7
    while place + 7 <= len(content):
        length = int.from_bytes(content[place + 4 : place + 6], "little")
        parts.append(content[place + 7 :][:length])
        place += 7 + length
        left_of_block = -place % 32_768
        if left_of_block < 7:
            place += left_of_block
    records = b"".join(parts)
    values: list[float] = []
    for match in re.finditer(re.escape(name.encode()) + rb"\x82\x01(.)", records, re.DOTALL):
        value = float(records[match.end() :][: match[1][0]])
        if value not in values:  # the history of the run has it, and its summary
            values.append(value)
    return values


def in_trackio(folder: Path, name: str) -> list[float]:
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    assert (folder / "trackio" / "huggingface.db").is_file()
    (run,) = SQLiteStorage.get_runs("huggingface")
    return [row[name] for row in SQLiteStorage.get_logs("huggingface", run) if name in row]


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "trackio"])
def test_figures_go_to_the_trackers_of_the_trainer(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four steps with a page after each: three entries, of steps 1 to 3; TRL's own entries are as many as steps.

    TRL 1.16 cannot log completions with images to W&B 0.31, with or without the callback, so its rows are texts.
    """
    from cepo.look.callback import CreditCallback

    pytest.importorskip(tracker, reason=f"{tracker} is not installed; pip install -e '.[trackers]' brings it")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    if tracker == "trackio":
        trackio_into(tmp_path / "trackio", monkeypatch)
    trainer = trainer_of(tmp_path, [], report_to=tracker, with_images=tracker != "wandb")
    callback = CreditCallback(every=1, responses=8, trainer=trainer)
    trainer.add_callback(callback)
    trainer.train()
    values_in = {"tensorboard": in_tensorboard, "wandb": in_wandb, "trackio": in_trackio}[tracker]
    seconds = values_in(tmp_path, "train/look/seconds")
    assert len(seconds) == 3
    assert 0 < seconds[0] < seconds[1] < seconds[2] < callback.seconds
    assert values_in(tmp_path, "train/look/dead_groups")
    assert values_in(tmp_path, "train/look/known_nats")
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    assert set(values_in(tmp_path, "train/reward")) == set(rewards)


def test_a_trainer_that_does_not_log_its_completions_is_refused(tmp_path: Path) -> None:
    from cepo.look.callback import CreditCallback

    with pytest.raises(ConfigError, match="set log_completions=True in GRPOConfig"):
        trainer_of(tmp_path, [CreditCallback()], log_completions=False).train()
