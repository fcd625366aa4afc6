"""Trains the chain world's weights further, so that worked solutions in view are used, and nothing else changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.doses.demonstrations import demonstrate_worked
from lab.worlds.chain import NUM_NAMINGS, WARM_START, generate_chain_problem
from lab.worlds.kinds import CHAIN
from lab.worlds.warmstart import Chunk, WarmStartSettings, batched_vision_attention, chunk_of, schedule, threads

SETTINGS = WarmStartSettings(
    num_steps=1800, batch_size=16, learning_rate=2e-3, num_warmup_steps=50, num_threads=1, bfloat16=False
)


def teach(folder: Path, *, settings: WarmStartSettings = SETTINGS, progress: Callable[..., None]) -> None:
    """Writes a copy of the chain world's weights to `folder` and trains it; a pure function of the settings.

    Three quarters of each batch are demonstrations of `demonstrate_worked`. The others are those of the warm start,
    without a hint or with an answer as hint; on their tokens the loss is the cross-entropy to the distribution of the
    shipped weights, so that the policy stays as it was.
    """
    from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

    shutil.copytree(CHAIN.assets, folder)
    processor: Any = AutoProcessor.from_pretrained(folder)
    model, before = (Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay
    )
    size = settings.batch_size
    num_worked = size * 3 // 4
    with threads(settings.num_threads), batched_vision_attention(model), batched_vision_attention(before):
        for step in range(settings.num_steps):
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * schedule(step, settings)
            first = NUM_NAMINGS + step * size
            problems = [generate_chain_problem(1, first + index, stream=WARM_START) for index in range(size)]
            worked = chunk_of(processor, CHAIN, [demonstrate_worked(one, seed=1) for one in problems[:num_worked]], 1.0)
            usual = chunk_of(processor, CHAIN, [CHAIN.demonstrate(one, 1) for one in problems[num_worked:]], 1.0)
            learnt = torch.nn.functional.cross_entropy(_logits(model, worked), _targets(worked))
            with torch.no_grad():
                kept = _logits(before, usual).softmax(-1)
            held = torch.nn.functional.cross_entropy(_logits(model, usual), kept)
            (learnt + held).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            progress(step + 1, learnt.item(), held.item() - _entropy(kept))
    model.save_pretrained(folder)


def _logits(model: Any, chunk: Chunk) -> Tensor:
    hidden = model.model(**chunk.inputs, use_cache=False).last_hidden_state
    return model.lm_head(hidden[chunk.rows, chunk.columns - 1]).float()


def _targets(chunk: Chunk) -> Tensor:
    return chunk.inputs["input_ids"][chunk.rows, chunk.columns]


def _entropy(kept: Tensor) -> float:
    return -float(torch.xlogy(kept, kept).sum(-1).mean())
