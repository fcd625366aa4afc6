"""Fine-tunes a language model on demonstrations of `running_totals`, before any reinforcement learning.

It learns the format, to stop, to choose every phrasing equally often, and to read a solution in its prompt: half of the
demonstrations have one in view, in the wording in which cepo's teachers read a reference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from cepo.data.prompts import HintTemplate
from cepo.models.cpu.matrix_products import use_fast_products
from lab.studies.running_totals.problems import Demonstration, Style, demonstration

STEPS_BETWEEN_STATES = 20
IGNORED = -100
"""The target of tokens that are not learnt: prompts and padding."""


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """The settings of the fine-tuning."""

    steps: int = 200
    batch_size: int = 16
    learning_rate: float = 3e-4
    warmup_steps: int = 20
    max_grad_norm: float = 1.0
    seed: int = 1
    style: Style = "free"
    forgotten_carries: float = 0.0
    """The probability with which a demonstration without the solution in view forgets a carry."""


Encoded = tuple[list[int], list[int]]
"""The tokens of a prompt, and those of its response with the end of the turn."""


class Encoder:
    """Turns demonstrations into tokens, as cepo renders prompts and teachers' contexts."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._hint = HintTemplate("user_suffix")

    def encode(self, each: Demonstration) -> Encoded:
        """Returns the tokens of a demonstration."""
        question = each.problem.question
        if each.shown is not None:
            question = self._hint.render(prompt=question, reference=each.shown)
        turns = [{"role": "user", "content": question}]
        prompt: str = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        prompt_ids: list[int] = self._tokenizer(prompt, add_special_tokens=False)["input_ids"]
        response_ids: list[int] = self._tokenizer(each.response, add_special_tokens=False)["input_ids"]
        return prompt_ids, [*response_ids, self._tokenizer.eos_token_id]


def padded(rows: Sequence[Encoded]) -> tuple[Int64[Tensor, "b t"], Int64[Tensor, "b t"]]:
    """Returns the tokens of the rows, and as targets those of the responses; padding is on the right."""
    longest = max(len(prompt) + len(response) for prompt, response in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    targets = torch.full((len(rows), longest), IGNORED)
    for number, (prompt, response) in enumerate(rows):
        end = len(prompt) + len(response)
        tokens[number, :end] = torch.tensor([*prompt, *response])
        targets[number, len(prompt) : end] = torch.tensor(response)
    return tokens, targets


def summed_loss(model: Any, rows: Sequence[Encoded], images: Sequence[Tensor]) -> Float[Tensor, ""]:
    """Returns the cross-entropy summed over the tokens of the responses; `images` are the pixels of each row, or none.

    Padding follows what is read, so that causal attention needs no mask.
    """
    tokens, targets = padded(rows)
    seen = {"pixel_values": torch.stack(list(images))} if images else {}
    hidden = model.model(input_ids=tokens, use_cache=False, **seen).last_hidden_state[:, :-1]
    next_targets = targets[:, 1:]
    is_learnt = next_targets != IGNORED
    logits = model.lm_head(hidden[is_learnt]).float()
    return torch.nn.functional.cross_entropy(logits, next_targets[is_learnt], reduction="sum")


def learning_rate_at(step: int, settings: WarmStart) -> float:
    """Returns the rate at the 0-based step: a linear warm-up, then a linear decay to a twentieth."""
    warmed = min(1.0, (step + 1) / settings.warmup_steps)
    left = max(0.05, 1.0 - step / settings.steps)
    return settings.learning_rate * warmed * left


def teach(
    model_path: str,
    folder: Path,
    settings: WarmStart,
    *,
    progress: Callable[[int, float, float], None],
) -> None:
    """Fine-tunes all weights of the model and writes it to `folder`; a pure function of the arguments but for rounding."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    encoder = Encoder(tokenizer)

    def add_gradient(indices: Sequence[int]) -> float:
        rows: list[Encoded] = []
        for index in indices:
            each = demonstration(
                index, seed=settings.seed, style=settings.style, forgotten_carries=settings.forgotten_carries
            )
            rows.append(encoder.encode(each))
        return accumulated(model, rows)

    fine_tune(model, folder, settings, add_gradient, progress=progress)
    tokenizer.save_pretrained(folder)


def fine_tune(
    model: Any,
    folder: Path,
    settings: WarmStart,
    add_gradient: Callable[[Sequence[int]], float],
    *,
    progress: Callable[[int, float, float], None],
) -> None:
    """Trains the weights that require a gradient, and writes the model to `folder`.

    `add_gradient` adds the gradient of the demonstrations of these numbers and returns their loss. Every
    `STEPS_BETWEEN_STATES` steps the state is kept beside the folder, from which an interrupted call goes on. `progress`
    gets the 1-based step, the mean loss of its tokens, and the seconds since the start of this process.
    """
    use_fast_products(model)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    state_file = folder.with_name(f"{folder.name}.state.pt")
    first_step = _restored(state_file, model, optimizer)
    started = time.monotonic()
    for step in range(first_step, settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, settings)
        first = step * settings.batch_size
        loss = add_gradient(range(first, first + settings.batch_size))
        torch.nn.utils.clip_grad_norm_(trained, settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        progress(step + 1, loss, time.monotonic() - started)
        if (step + 1) % STEPS_BETWEEN_STATES == 0:
            _keep(state_file, model, optimizer, step + 1)
    model.save_pretrained(folder)
    state_file.unlink(missing_ok=True)


def _keep(file: Path, model: Any, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "num_steps": num_steps}, partial)
    partial.replace(file)


def _restored(file: Path, model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Returns the number of steps that the kept state has done, after restoring it; 0 without one."""
    if not file.exists():
        return 0
    state: dict[str, Any] = torch.load(file, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["num_steps"]


def accumulated(model: Any, rows: Sequence[Encoded], images: Sequence[Tensor] = ()) -> float:
    """Adds the gradient of the mean loss over the tokens of all rows, and returns it; `images` as in `summed_loss`.

    The shorter half of the rows is a pass of its own, which saves its padding.
    """
    by_length = sorted(range(len(rows)), key=lambda index: len(rows[index][0]) + len(rows[index][1]))
    num_tokens = sum(len(response) for _, response in rows)
    middle = len(by_length) // 2
    total = 0.0
    for part in (by_length[:middle], by_length[middle:]):
        loss = summed_loss(model, [rows[index] for index in part], [images[index] for index in part if images])
        (loss / num_tokens).backward()
        total += float(loss.detach())
    return total / num_tokens
