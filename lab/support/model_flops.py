"""Computes the floating-point operations of a Qwen3-VL; a multiply-add counts as 2.

Norms, activation functions, rotations, softmax and sampling are left out: they are small and memory-bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from testing.shapes import Shape

PATCH_VALUES = 3 * 2 * 16 * 16
"""Values of one patch: colours x frames x pixels."""
ATTENTION_BACKWARD = 2.5
"""The cost of the backward pass of fused attention relative to the forward pass; it recomputes the scores."""


def causal_pairs(length: int, start: int = 0) -> int:
    """Counts the query-key pairs of queries `start` to `length` - 1, each of which sees itself and all before it."""
    return (length * (length + 1) - start * (start + 1)) // 2


@dataclass(frozen=True)
class ModelFlops:
    """The operations of one shape; `lora_rank` 0 is full fine-tuning, in which the vision tower is trained too."""

    shape: Shape
    lora_rank: int = 0

    @property
    def token(self) -> int:
        """Linear layers of the language model, one token, forward."""
        shape = self.shape
        queries, keys = shape.heads * shape.head_width, shape.key_value_heads * shape.head_width
        attention = shape.hidden * (queries + 2 * keys) + queries * shape.hidden
        return 2 * shape.layers * (attention + 3 * shape.hidden * shape.intermediate)

    @property
    def adapter_token(self) -> int:
        """LoRA on all linear layers, one token, forward."""
        shape = self.shape
        queries, keys = shape.heads * shape.head_width, shape.key_value_heads * shape.head_width
        sides = (shape.hidden + queries) + 2 * (shape.hidden + keys) + (queries + shape.hidden)
        sides += 3 * (shape.hidden + shape.intermediate)
        return 2 * shape.layers * self.lora_rank * sides

    @property
    def head(self) -> int:
        """The LM head, one token, forward."""
        return 2 * self.shape.hidden * self.shape.vocabulary

    @property
    def pair(self) -> int:
        """Scores and weighted sum of one query-key pair, all layers, forward."""
        return 4 * self.shape.heads * self.shape.head_width * self.shape.layers

    @property
    def image(self) -> int:
        """The vision tower with its mergers, one image, forward."""
        shape = self.shape
        patches, width = 4 * shape.image_tokens, shape.vision_hidden
        layer = 2 * patches * (4 * width**2 + 2 * width * shape.vision_intermediate) + 4 * width * patches**2
        mergers = (
            (1 + len(shape.deepstack_layers)) * 2 * shape.image_tokens * ((4 * width) ** 2 + 4 * width * shape.hidden)
        )
        return 2 * patches * PATCH_VALUES * width + shape.vision_layers * layer + mergers

    def generate(self, prompt: int, responses: list[int]) -> int:
        """Counts the sampling of one prompt, which is read once; last sampled tokens and finished rows cost nothing."""
        linear = self.token + self.adapter_token
        total = self.image + prompt * linear + self.pair * causal_pairs(prompt) + self.head
        for response in responses:
            total += (response - 1) * (linear + self.head) + self.pair * causal_pairs(prompt + response - 1, prompt)
        return total

    def score(self, context: int, responses: list[int], *, images: int = 1) -> int:
        """Counts the scoring of responses, each with its own copy of the context; the head runs on responses only."""
        linear = self.token + self.adapter_token
        return images * self.image + sum(
            (context + response) * linear + response * self.head + self.pair * causal_pairs(context + response)
            for response in responses
        )

    def update(self, context: int, responses: list[int], *, checkpointing: bool, images: int = 1) -> int:
        """Counts forward and backward of such rows; layers are recomputed if `checkpointing`, a trained head always."""
        full = self.lora_rank == 0
        forwards = 2 if checkpointing else 1
        # Frozen weights need no weight gradient; adapters do, and so do all weights in full fine-tuning.
        linear = self.token * (forwards + (2 if full else 1)) + self.adapter_token * (forwards + 2)
        head = self.head * (4 if full else 2)
        pair = self.pair * (forwards + ATTENTION_BACKWARD)
        tower = self.image * (3 if full else 1)
        rows = sum(
            (context + response) * linear + response * head + pair * causal_pairs(context + response)
            for response in responses
        )
        return round(images * tower + rows)
