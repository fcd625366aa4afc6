"""A text-only model (Qwen3) goes the same way as Qwen3-VL: prompts, adapter, two training steps with either generator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from isolation import own_caches
from tiny_checkpoints import write_checkpoint

import cepo.train
from cepo.config import load_config
from cepo.config.schema import DataConfig
from cepo.data.dataset import ProblemSet
from cepo.errors import DataError
from cepo.models.processing import Processing

REWARD = '''
def parity(samples):
    """Right where the character codes add up to an even number: half of whatever an untrained model writes."""
    verdicts = [float(sum(map(ord, sample["response"])) % 2 == 0) for sample in samples]
    return [{"overall": verdict, "accuracy": verdict} for verdict in verdicts]
'''


@pytest.fixture(autouse=True)
def _as_it_was(tmp_path: Path) -> Iterator[None]:
    """What a run keeps for the next start ends with its test."""
    with own_caches(tmp_path / "caches"):
        yield


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    return write_checkpoint("qwen3", tmp_path_factory.mktemp("text-model"))


@pytest.fixture
def text_run(text_model: Path, tmp_path: Path) -> list[str]:
    """Two steps of 4 prompts x 4 responses on a text-only jsonl, which is the held-out set too."""
    rows = [{"problem": f"What is {number} + {number}?", "answer": str(2 * number)} for number in range(8)]
    data, reward = tmp_path / "sums.jsonl", tmp_path / "reward.py"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward.write_text(REWARD)
    return [
        "config=configs/microgeo/base.yaml",
        f"data.train_files={data}",
        f"data.val_files={data}",
        "data.format_prompt=null",
        "data.max_response_length=10",
        "data.rollout_batch_size=4",
        "algorithm.adv_estimator=cepo",
        "algorithm.negative.source=peer_full",
        f"worker.actor.model.model_path={text_model}",
        "worker.actor.global_batch_size=2",
        "worker.actor.micro_batch_size_per_device_for_update=4",
        "worker.actor.optim.lr=1e-3",
        "worker.rollout.name=transformers",
        "worker.rollout.n=4",
        f"worker.reward.reward_function={reward}:parity",
        "trainer.logger=[file]",
        "trainer.max_steps=2",
        "trainer.save_freq=1",
        f"trainer.save_checkpoint_path={tmp_path / 'run'}",
    ]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("engine", "rank"),
    [
        ("transformers", 0),
        pytest.param("transformers", 4, marks=pytest.mark.nightly("an adapter is trained with vLLM")),
        ("vllm", 4),
        pytest.param("vllm", 0, marks=pytest.mark.nightly("one more start of vLLM")),
    ],
)
def test_a_text_model_trains_2_steps_as_its_generators_score(
    text_run: list[str], tmp_path: Path, rank: int, engine: str
) -> None:
    """Log-probs agree to 1e-4."""
    if engine == "vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed")
    arguments = [*text_run, f"worker.actor.model.lora.rank={rank}", f"worker.rollout.name={engine}"]
    cepo.train.train(load_config(arguments))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["rollout/log_prob_gap_mean"] < 1e-4
        assert row["actor/skipped_updates"] == 0
        assert row["actor/grad_norm"] > 0
        assert row["work/teacher_rows"] > 0
    assert rows[0]["val/num_samples"] == 8
    assert (tmp_path / "run" / "global_step_2" / "trainer_state.json").is_file()


def test_a_text_prompt_is_its_template_with_padded_ids_banned(text_model: Path) -> None:
    processing = Processing(str(text_model))
    prompt = processing.encode("Find x.", None)
    assert processing.decode(prompt.token_ids, skip_special_tokens=False) == (
        "<|im_start|>user\nFind x.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.engine_ids == prompt.token_ids
    assert processing.image_token_id is None
    size, padded = len(processing.tokenizer), json.loads((text_model / "config.json").read_text())["vocab_size"]
    assert size < padded
    assert set(range(size, padded)) <= set(processing.banned_token_ids)


def test_a_picture_for_a_text_model_is_refused_with_its_row(text_model: Path, tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    rows = [{"problem": "1 + 1?", "images": [], "answer": "2"}]
    rows.append({"problem": "<image>How long?", "images": [str(tmp_path / "a.png")], "answer": "2"})  # type: ignore[dict-item]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"row 1: the row has images, but the model's folder has no image processor"):
        ProblemSet(str(file), DataConfig(train_files=str(file), prompt_key="problem"), Processing(str(text_model)))


@pytest.mark.heavy
@pytest.mark.filterwarnings("error:You have passed exclude_modules")
def test_a_text_models_default_adapter_warns_0_times(text_model: Path) -> None:
    from transformers import Qwen3ForCausalLM

    from cepo.config.schema import LoraConfig
    from cepo.workers.adapters import add_adapter

    model: Any = Qwen3ForCausalLM.from_pretrained(text_model, dtype=torch.float32)
    wrapped = add_adapter(model, LoraConfig(rank=2), dtype=torch.float32, seed=1)
    assert sum("lora_A" in name for name, _ in wrapped.named_parameters()) == 2 * 7
