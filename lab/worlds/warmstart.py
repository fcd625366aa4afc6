"""Fine-tunes the embedded model on noisy demonstrations (the warm start)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lab.worlds.demonstrations import WARM_START, Demonstration, user_messages
from lab.worlds.kinds import SHAPES, TaughtWorld

if TYPE_CHECKING:
    from transformers import Qwen3VLForConditionalGeneration

Progress = Callable[[str, int, int], None]

_END_OF_TURN = "<|im_end|>"


@dataclass(frozen=True)
class WarmStartSettings:
    """Settings of AdamW with warm-up and cosine decay.

    `seen_weight` is the loss weight of the tokens that state what is seen; with weight 1 the model learns to guess them
    and ignores the image. The learning rate reaches 0 after `cosine_steps`, or at the end if that is None. `num_chunks`
    splits a batch by length; like `num_threads`, it changes results only by rounding. Without `bfloat16` all arithmetic
    is in float32, which is faster for small batches.
    """

    num_steps: int = 400
    cosine_steps: int | None = None
    batch_size: int = 128
    learning_rate: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    num_warmup_steps: int = 50
    max_grad_norm: float = 1.0
    seen_weight: float = 8.0
    num_chunks: int = 2
    num_threads: int = 2
    bfloat16: bool = True


@dataclass(frozen=True)
class Chunk:
    """Some right-padded sequences of a batch: model inputs, and the (rows, columns) of the response tokens."""

    inputs: dict[str, Tensor]
    rows: Tensor
    columns: Tensor
    weights: Tensor


def warm_start(
    folder: Path,
    *,
    kind: TaughtWorld = SHAPES,
    settings: WarmStartSettings | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[float]:
    """Trains the checkpoint in `folder` in place and returns the loss of each step.

    On one machine, the same folder content, settings and seed give bitwise equal weights, because the number of threads
    is fixed during training.
    """
    from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

    settings = settings or WarmStartSettings(**kind.warm_start)
    processor = AutoProcessor.from_pretrained(folder)
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    with threads(settings.num_threads):
        losses = _train(model, processor, kind, settings, seed, progress)
    model.save_pretrained(folder)
    return losses


def _train(
    model: Qwen3VLForConditionalGeneration,
    processor: Any,
    kind: TaughtWorld,
    settings: WarmStartSettings,
    seed: int,
    progress: Progress | None,
) -> list[float]:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay
    )
    model.train()
    losses = []
    with batched_vision_attention(model):
        for step in range(settings.num_steps):
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * schedule(step, settings)
            chunks = _batch(processor, kind, settings, seed, step)
            total_weight = sum(float(chunk.weights.sum()) for chunk in chunks)
            loss = 0.0
            for chunk in chunks:
                with torch.autocast("cpu", torch.bfloat16, enabled=settings.bfloat16):
                    chunk_loss = _weighted_loss(model, chunk) / total_weight
                chunk_loss.backward()
                loss += chunk_loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
            if progress is not None:
                progress("warm start", step + 1, settings.num_steps)
    model.eval()
    return losses


def schedule(step: int, settings: WarmStartSettings) -> float:
    """Linear warm-up to 1, then half a cosine down to 0."""
    if step < settings.num_warmup_steps:
        return (step + 1) / settings.num_warmup_steps
    length = settings.cosine_steps or settings.num_steps
    done = (step - settings.num_warmup_steps) / max(1, length - settings.num_warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * done))


def _weighted_loss(model: Qwen3VLForConditionalGeneration, chunk: Chunk) -> Tensor:
    hidden = model.model(**chunk.inputs, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[chunk.rows, chunk.columns - 1]).float()
    targets = chunk.inputs["input_ids"][chunk.rows, chunk.columns]
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return (losses * chunk.weights).sum()


def _batch(processor: Any, kind: TaughtWorld, settings: WarmStartSettings, seed: int, step: int) -> list[Chunk]:
    """Returns the demonstrations of one step, split by length into chunks to reduce padding."""
    start = step * settings.batch_size
    demonstrations = [
        kind.demonstrate(kind.generate(seed, index, stream=WARM_START), seed)
        for index in range(start, start + settings.batch_size)
    ]
    demonstrations.sort(key=lambda one: (len(one.response), one.hint is None))
    size = math.ceil(len(demonstrations) / settings.num_chunks)
    return [
        chunk_of(processor, kind, demonstrations[first : first + size], settings.seen_weight)
        for first in range(0, len(demonstrations), size)
    ]


def chunk_of(processor: Any, kind: TaughtWorld, demonstrations: list[Demonstration], seen_weight: float) -> Chunk:
    prompts = [
        processor.apply_chat_template(
            user_messages(one.problem.question, one.hint), add_generation_prompt=True, tokenize=False
        )
        for one in demonstrations
    ]
    images = [kind.draw(one.problem) for one in demonstrations]
    texts = [prompt + one.response + _END_OF_TURN for prompt, one in zip(prompts, demonstrations, strict=True)]
    inputs: dict[str, Any] = dict(
        processor(text=texts, images=images, padding=True, padding_side="right", return_tensors="pt")
    )
    rows, columns, weights = [], [], []
    seen = {processor.tokenizer(f" {word}").input_ids[0] for word in kind.seen_words}
    ends = inputs["attention_mask"].sum(1).tolist()
    for row, (one, end) in enumerate(zip(demonstrations, ends, strict=True)):
        ids = processor.tokenizer(one.response + _END_OF_TURN).input_ids
        length = len(ids)
        rows += [row] * length
        columns += range(end - length, end)
        is_seen = [token in seen for token in ids] if seen else [True] + [False] * (length - 1)
        weights += [seen_weight if stated else 1.0 for stated in is_seen]
    return Chunk(inputs, torch.tensor(rows), torch.tensor(columns), torch.tensor(weights))


@contextmanager
def batched_vision_attention(model: Qwen3VLForConditionalGeneration) -> Iterator[None]:
    """Makes the vision tower compute attention for images of equal size in one call; mixed sizes use the original code.

    transformers computes it image by image, which for hundreds of 64x64 images costs more than the arithmetic. The
    results are equal up to float rounding.
    """
    attentions = [block.attn for block in model.model.visual.blocks]
    for attention in attentions:
        attention.forward = partial(_batched_forward, attention, attention.forward)
    try:
        yield
    finally:
        for attention in attentions:
            del attention.forward


def _batched_forward(
    attention: Any,
    usual_forward: Any,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    **kwargs: Any,
) -> Tensor:
    from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision

    lengths = cu_seqlens.diff()
    if not bool((lengths == lengths[0]).all()):
        return usual_forward(hidden_states, cu_seqlens=cu_seqlens, position_embeddings=position_embeddings, **kwargs)
    num_images = len(lengths)
    num_patches = hidden_states.shape[0] // num_images
    query, key, value = attention.qkv(hidden_states).view(-1, 3, attention.num_heads, attention.head_dim).unbind(1)
    query, key = apply_rotary_pos_emb_vision(query, key, *position_embeddings)

    def by_image(states: Tensor) -> Tensor:
        return states.view(num_images, num_patches, attention.num_heads, attention.head_dim).transpose(1, 2)

    attended = torch.nn.functional.scaled_dot_product_attention(
        by_image(query), by_image(key), by_image(value), scale=attention.scaling
    )
    return attention.proj(attended.transpose(1, 2).reshape(hidden_states.shape))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
