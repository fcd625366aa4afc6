"""Text models, architectures that no page names, and the sizes of each family; tests/runs/test_families.py trains them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from json_files import write_lines
from tiny_checkpoints import FAMILIES, write_checkpoint

from cepo.config.schema import DataConfig
from cepo.config.worker_schema import LoraConfig
from cepo.data.dataset import ProblemSet
from cepo.errors import ConfigError, DataError
from cepo.models.families import FAMILIES as SUPPORTED
from cepo.models.families import family_of
from cepo.models.interface import EngineUse
from cepo.models.processing import Processing
from cepo.workers.memory import shape_of


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    return write_checkpoint("qwen3", tmp_path_factory.mktemp("text-model"))


def test_ids_beyond_the_tokenizers_are_banned(text_model: Path) -> None:
    processing = Processing(str(text_model))
    size = len(processing.tokenizer)
    padded = json.loads((text_model / "config.json").read_text())["vocab_size"]
    assert size < padded
    assert set(range(size, padded)) <= set(processing.banned_token_ids)


def test_a_picture_for_a_text_model_is_refused_with_its_row(text_model: Path, tmp_path: Path) -> None:
    from PIL import Image

    image = tmp_path / "a.png"
    file = tmp_path / "rows.jsonl"
    Image.new("RGB", (64, 64)).save(image)
    questions: dict[str, list[str]] = {"1 + 1?": [], "<image>How long?": [str(image)]}
    rows = [{"problem": text, "images": images, "answer": "2"} for text, images in questions.items()]
    write_lines(file, rows)
    with pytest.raises(DataError, match=r"row 1: the row has images, but the model's folder has no image processor"):
        ProblemSet(
            str(file),
            DataConfig(train_files=str(file), prompt_key="problem"),
            Processing(str(text_model)),
        )


@pytest.mark.heavy
@pytest.mark.filterwarnings("error:You have passed exclude_modules")
def test_a_text_models_default_adapter_warns_0_times(text_model: Path) -> None:
    from transformers import Qwen3ForCausalLM

    from cepo.workers.adapters import add_adapter

    model: Any = Qwen3ForCausalLM.from_pretrained(text_model, dtype=torch.float32)
    wrapped = add_adapter(model, LoraConfig(rank=2), dtype=torch.float32, seed=1)
    assert sum("lora_A" in name for name, _ in wrapped.named_parameters()) == 2 * 7


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 128}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2}


def test_an_unsupported_vision_model_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import PaliGemmaConfig

    PaliGemmaConfig().save_pretrained(tmp_path)
    reason = r"model_type 'paligemma' .* not supported: its images are not read here"
    with pytest.raises(ConfigError, match=reason) as caught:
        Processing(str(tmp_path))
    assert "Qwen2.5-VL" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unlisted_text_model_is_refused_by_name() -> None:
    """Others may scale or cap their logits, as Gemma 2 and Granite do, which only a test of each type shows."""
    from transformers import GraniteConfig

    with pytest.raises(ConfigError, match=r"model_type 'granite' .* not supported: no family here has that type"):
        family_of(GraniteConfig())


TEXT_TYPES = [model_type for family in SUPPORTED if not family.reads_images for model_type in family.model_types]


@pytest.mark.parametrize("model_type", TEXT_TYPES)
def test_every_listed_text_model_has_a_plain_head(model_type: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    experts = (
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if model_type.endswith("_moe") else {}
    )
    no_ids = {
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }  # a type's own are beyond the vocabulary
    config = AutoConfig.for_model(model_type, **SIZES, **experts, **no_ids)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        token_ids = torch.arange(8)[None]  # (1, 8)
        log_probs = model(input_ids=token_ids).logits.log_softmax(-1)
        plain_log_probs = model.lm_head(model.model(input_ids=token_ids).last_hidden_state).log_softmax(-1)
    assert float((log_probs - plain_log_probs).abs().max()) < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_the_doctor_counts_every_familys_weights(family: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoConfig

    folder = write_checkpoint(family, tmp_path)
    config: Any = AutoConfig.from_pretrained(folder)
    shape = shape_of(config)
    stored = load_file(folder / "model.safetensors")
    # Single numbers are no parameters: Gemma 4 has some by which layers are scaled, or their inputs clipped.
    assert shape.parameters == sum(weight.numel() for weight in stored.values() if weight.numel() > 1)
    assert (shape.vision > 0) == family_of(config).reads_images
    assert shape.linear_sides >= 2 * 4 * shape.hidden, "two projections of attention in each of two layers or more"


@pytest.mark.heavy
@pytest.mark.parametrize("family", ["internvl", "smolvlm", "idefics3", "llava_onevision"])
def test_rows_that_part_between_images_score_like_padded_ones(family: str, tmp_path: Path) -> None:
    """Each image is a unit: the row holds the first once, and the second, of several tiles, in both branches."""
    from actors import build_actor
    from PIL import Image

    from cepo.data.batch import ScoringRow

    folder = write_checkpoint(family, tmp_path)
    processing = Processing(str(folder))
    images = processing.load_images([Image.new("RGB", (64, 64), "red"), Image.new("RGB", (120, 60), "blue")])
    rows: list[ScoringRow] = []
    for number, word in enumerate(("before", "beside")):
        context = processing.encode(f"<image> {word} <image> Which?", images)
        rows.append(ScoringRow(context=context, response_ids=numpy.array([5, 6, 7]), prompt=number))
    packed = build_actor(folder)
    assert packed.passes.packed
    scores = packed.score(rows)
    padded = build_actor(folder, padding_free=False)
    expected = padded.score(rows)
    assert float((torch.cat(scores) - torch.cat(expected)).abs().max()) < 1e-5
    assert float((expected[0] - expected[1]).abs().max()) > 1e-3


def test_a_model_that_sees_whole_images_is_known_by_its_config(tmp_path: Path) -> None:
    """Gemma 4: vLLM's attention on a CPU is causal, as that of the small models; on a GPU it serves both."""
    on_cpu = EngineUse(on_gpu=False, dtype="fp32", with_adapter=False, most_images=1)
    for family, reason in (("gemma4", None), ("gemma4_large", "masks later tokens of the same image")):
        processing = Processing(str(write_checkpoint(family, tmp_path / family)))
        refusal = processing.family.why_not_vllm(on_cpu)
        assert (refusal is None) == (reason is None)
        assert reason is None or reason in str(refusal)
        assert processing.family.why_not_vllm(dataclasses.replace(on_cpu, on_gpu=True)) is None
