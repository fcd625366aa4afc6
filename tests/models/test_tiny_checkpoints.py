"""The tiny checkpoint of each model family loads through transformers' Auto classes, and its answer depends on the image."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from tiny_checkpoints import FAMILIES, TEXT_FAMILIES, VISION_FAMILIES, write_checkpoint

pytestmark = pytest.mark.nightly("what the tests of families stand on, and nothing of the package")
_MAX_IMAGE_TOKENS = 64


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's checkpoint folder, written when it is first asked for. Read only."""
    root = tmp_path_factory.mktemp("tiny-checkpoints")

    @cache
    def write(family: str) -> Path:
        if family == "smolvlm":
            pytest.importorskip("num2words", reason="SmolVLM's processor needs the package num2words")
        return write_checkpoint(family, root / family)

    return write


def _image(seed: int, size: tuple[int, int]) -> Image.Image:
    pixels = numpy.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=numpy.uint8)
    return Image.fromarray(pixels)


def _inputs(processor: Any, *images: Image.Image, text: str = "Find x.") -> Any:
    parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
    return processor.apply_chat_template(
        [{"role": "user", "content": parts}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )


def _loaded(auto: Any, folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model, and the names of weights that the files lack, have too many, or have in another shape."""
    model, report = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    return model.eval(), report


@torch.no_grad()
def _next_log_probs(model: Any, inputs: Any) -> torch.Tensor:
    return model(**inputs).logits[0, -1].log_softmax(dim=0)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_the_answer_depends_on_the_image(family: str, written: Callable[[str], Path]) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(written(family))
    model, report = _loaded(AutoModelForImageTextToText, written(family))
    first, second = (_inputs(processor, _image(seed, (56, 56))) for seed in (1, 2))
    several = _inputs(processor, _image(3, (112, 84)), _image(4, (60, 150)))

    assert not any(report.values()), report
    assert model.config.model_type == family
    assert torch.equal(first["input_ids"], second["input_ids"])
    image_tokens = int((first["input_ids"] == model.config.image_token_id).sum())
    assert 0 < image_tokens <= _MAX_IMAGE_TOKENS
    assert int((several["input_ids"] == model.config.image_token_id).sum()) > 0
    answer = _next_log_probs(model, first)
    assert (answer - _next_log_probs(model, second)).abs().max() > 0.05
    assert torch.isfinite(_next_log_probs(model, several)).all()
    probabilities = answer.exp()
    assert probabilities.max() > 2 / len(probabilities)  # not flat
    assert probabilities.max() < 0.5  # and not certain


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_the_answer_depends_on_the_text(family: str, written: Callable[[str], Path]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(written(family))
    model, report = _loaded(AutoModelForCausalLM, written(family))
    answers = [_next_log_probs(model, _inputs(tokenizer, text=text)) for text in ("Find x.", "Find the area.")]
    assert not any(report.values()), report
    assert model.config.model_type == family
    assert (answers[0] - answers[1]).abs().max() > 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_ends_with_the_familys_own_token(family: str, written: Callable[[str], Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(written(family))
    settings = json.loads((written(family) / "generation_config.json").read_text())
    assert tokenizer.eos_token_id in settings["eos_token_id"]
    assert None not in settings["eos_token_id"]
    assert (
        tokenizer.decode(tokenizer("Größe: 5 × 3 ≤ 15")["input_ids"], skip_special_tokens=True) == "Größe: 5 × 3 ≤ 15"
    )


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    files = [write_checkpoint("qwen2", tmp_path / str(n), seed=seed) for n, seed in enumerate((3, 3, 4))]
    first, same, other = ((folder / "model.safetensors").read_bytes() for folder in files)
    assert first == same
    assert first != other
