"""The policy as plain transformers loads it, prompts by its own processor and chat template, and adapters by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reference_trainer.settings import Problem, Response


class Adapted(nn.Module):
    """W x + (alpha / rank) B A x."""

    def __init__(self, layer: nn.Linear, down: Tensor, up: Tensor, scale: float) -> None:
        super().__init__()
        self.layer = layer
        self.scale = scale
        self.down = nn.Parameter(down.clone())
        self.up = nn.Parameter(up.clone())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) + self.scale * ((inputs @ self.down.T) @ self.up.T)


class Prompts:
    """Tokens and pixels of questions, with or without a sample answer in view."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoProcessor

        self._processor: Any = AutoProcessor.from_pretrained(folder)
        self._end = self._processor.tokenizer.convert_tokens_to_ids("<|im_end|>")

    def encode(self, problem: Problem, shown: str | None = None) -> dict[str, Tensor]:
        text = problem.question if shown is None else f"{problem.question}\nHere is a sample answer: {shown}"
        content: list[dict[str, str]] = [{"type": "image"} for _ in problem.images]
        content.append({"type": "text", "text": text})
        messages = [{"role": "user", "content": content}]
        prompt = self._processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs: dict[str, Any] = {"text": [prompt]}
        if problem.images:
            inputs["images"] = list(problem.images)
        return dict(self._processor(**inputs, return_tensors="pt", return_mm_token_type_ids=True))

    def response_ids(self, response: Response) -> list[int]:
        ids = self._processor.tokenizer(response.text, add_special_tokens=False)["input_ids"]
        return ids if response.cut else [*ids, self._end]


def load_policy(folder: Path) -> Any:
    from transformers import Qwen3VLForConditionalGeneration

    return Qwen3VLForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def adapt(model: Any, weights: Mapping[str, Tensor], rank: int, alpha: int) -> dict[str, nn.Parameter]:
    """Puts an adapter on every layer that `weights` names (`<layer>.lora_A.weight`, `<layer>.lora_B.weight`); its weights."""
    trained: dict[str, nn.Parameter] = {}
    model.requires_grad_(False)
    for layer in sorted({re.sub(r"\.lora_[AB]\.weight$", "", name) for name in weights}):
        parent, _, name = layer.rpartition(".")
        owner = model.get_submodule(parent)
        adapted = Adapted(
            getattr(owner, name), weights[f"{layer}.lora_A.weight"], weights[f"{layer}.lora_B.weight"], alpha / rank
        )
        setattr(owner, name, adapted)
        trained |= {f"{layer}.lora_A.weight": adapted.down, f"{layer}.lora_B.weight": adapted.up}
    return trained


def _inputs(prompt: Mapping[str, Tensor], response: Sequence[int]) -> dict[str, Tensor]:
    ids = torch.cat([prompt["input_ids"], torch.tensor([list(response)])], dim=1)
    kinds = torch.cat([prompt["mm_token_type_ids"], torch.zeros(1, len(response), dtype=torch.long)], dim=1)
    pixels = {name: prompt[name] for name in ("pixel_values", "image_grid_thw") if name in prompt}
    return {"input_ids": ids, "mm_token_type_ids": kinds, **pixels}


def response_logits(model: Any, prompt: Mapping[str, Tensor], response: Sequence[int], temperature: float) -> Tensor:
    """(response length, V): what predicts each response token."""
    start = prompt["input_ids"].shape[1]
    return model(**_inputs(prompt, response)).logits[0, start - 1 : -1] / temperature


def sampled_log_probs(logits: Tensor, response: Sequence[int]) -> Tensor:
    """(response length,)"""
    return logits.log_softmax(dim=1)[torch.arange(len(response)), torch.tensor(list(response))]


class ValueModel(nn.Module):
    """The same body with one number in place of a distribution."""

    def __init__(self, folder: Path, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.body = load_policy(folder).model
        self.weight = nn.Parameter(weight.clone())
        self.bias = nn.Parameter(bias.clone())

    def values(self, prompt: Mapping[str, Tensor], response: Sequence[int]) -> Tensor:
        """(response length,) the value before each response token."""
        start = prompt["input_ids"].shape[1]
        hidden = self.body(**_inputs(prompt, response)).last_hidden_state[0, start - 1 : -1]
        return (hidden @ self.weight.T + self.bias)[:, 0]
