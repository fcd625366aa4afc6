"""A text-only model (Qwen3) goes the same way as Qwen3-VL: prompts, positions, generators, adapter, two training steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from isolation import own_caches, restored_process
from rounding import LOG_PROBS

import cepo.train
from cepo.config import load_config
from cepo.config.schema import DataConfig
from cepo.data.batch import ScoringRow
from cepo.data.dataset import ProblemSet
from cepo.errors import DataError
from cepo.models.processing import Processing
from cepo.workers.scoring_model import ImageEncoder, ScoringModel, collate

REWARD = '''
def parity(samples):
    """Right where the character codes add up to an even number: half of whatever an untrained model writes."""
    verdicts = [float(sum(map(ord, sample["response"])) % 2 == 0) for sample in samples]
    return [{"overall": verdict, "accuracy": verdict} for verdict in verdicts]
'''


@pytest.fixture(autouse=True)
def _as_it_was(tmp_path: Path) -> Iterator[None]:
    """A run's signal handler and log level end with its test, and what it keeps for the next start too."""
    with restored_process(), own_caches(tmp_path / "caches"):
        yield


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 checkpoint folder of random weights with the embedded world's tokenizer. Read only."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    from lab.worlds.tokenizer import build_tokenizer

    tokenizer: Any = build_tokenizer()
    end_of_turn, end_of_text = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>"))
    config = Qwen3Config(
        vocab_size=len(tokenizer) + 12,  # padded, as the real ones are
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=end_of_turn,
        pad_token_id=end_of_text,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = Qwen3ForCausalLM(config).float()
        for parameter in model.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.1)
    model.generation_config = GenerationConfig(eos_token_id=[end_of_turn, end_of_text], pad_token_id=end_of_text)
    folder = tmp_path_factory.mktemp("text-model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


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


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


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
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["rollout/log_prob_gap_mean"] < 1e-4
        assert row["actor/skipped_updates"] == 0
        assert row["actor/grad_norm"] > 0
        assert row["work/teacher_rows"] > 0
    assert rows[0]["val/num_samples"] == 8
    assert (tmp_path / "run" / "global_step_2" / "trainer_state.json").is_file()


@pytest.mark.heavy
@pytest.mark.nightly("three runs; tests/runs/test_resume.py resumes batches without images")
def test_a_text_run_resumes_to_the_same_second_step(text_run: list[str], tmp_path: Path) -> None:
    cepo.train.train(load_config(text_run))
    cepo.train.train(
        load_config([*text_run, f"trainer.save_checkpoint_path={tmp_path / 'again'}", "trainer.max_steps=1"])
    )
    cepo.train.train(load_config([*text_run, f"trainer.save_checkpoint_path={tmp_path / 'again'}"]))
    whole, resumed = (next(row for row in metrics_of(tmp_path / name) if row["step"] == 2) for name in ("run", "again"))
    assert resumed["actor/grad_norm"] == whole["actor/grad_norm"]
    assert resumed["reward/mean"] == whole["reward/mean"]


def test_scores_of_padded_rows_are_the_models_alone(text_model: Path) -> None:
    from transformers import Qwen3ForCausalLM

    processing = Processing(str(text_model))
    assert processing.image_token_id is None
    model: Any = Qwen3ForCausalLM.from_pretrained(text_model, dtype=torch.float32).eval()
    rows = [
        ScoringRow(context=processing.encode(text, None), response_ids=response)
        for text, response in (("Find x.", (40, 41, 42, 43, 44)), ("What is the area of the circle?", (60, 61)))
    ]
    batch = collate(rows, processing=processing, device=torch.device("cpu"))
    with torch.no_grad():
        scored, _ = ScoringModel(model, temperature=1.0, encoder=ImageEncoder(keep=False))(batch)
        alone = []
        for row in rows:
            logits = model(torch.tensor([[*row.context.token_ids, *row.response_ids]])).logits[0].log_softmax(-1)
            places = logits[len(row.context.token_ids) - 1 : -1]
            alone.append(places.gather(1, torch.tensor(row.response_ids)[:, None])[:, 0])
    assert float((scored - torch.cat(alone)).abs().max()) < LOG_PROBS


def test_a_text_prompt_is_its_template_with_padded_ids_banned(text_model: Path) -> None:
    """The 12 padded ids are banned."""
    processing = Processing(str(text_model))
    prompt = processing.encode("Find x.", None)
    assert processing.decode(prompt.token_ids, skip_special_tokens=False) == (
        "<|im_start|>user\nFind x.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.engine_ids == prompt.token_ids
    size = len(processing.tokenizer)
    assert set(range(size, size + 12)) <= set(processing.banned_token_ids)


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
