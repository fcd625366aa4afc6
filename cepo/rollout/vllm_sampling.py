"""Draws vLLM's tokens with `cepo.rollout.token_sampling`, for vLLM's CPU build.

That build cannot seed requests itself: if a prompt is read in several pieces it takes back the random numbers of the
pieces, which a CPU's random stream cannot do, and the engine dies. Here the token is drawn while vLLM processes the
logits, and vLLM then finds only that token left. vLLM has already computed the raw log-probs by then.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates

from cepo.rollout.token_sampling import draw_tokens, row_uniforms, without_repeats

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate

_KEY = "cepo_draw"


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The sampling settings of one request's tokens, which travel in `SamplingParams.extra_args`."""

    seed: int
    sample: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    presence_penalty: float
    banned: list[int] = field(repr=False)

    def extra_args(self) -> dict[str, Any]:
        """Returns the arguments that `SeededDraws` reads."""
        return {_KEY: asdict(self)}


@dataclass(frozen=True)
class _Row:
    draw: Draw
    uniforms: Tensor
    output: list[int]  # vLLM's own list, which grows with the response


class SeededDraws(LogitsProcessor):
    """Leaves each row of the batch only the token that its own random stream draws."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        """Returns False because the draw decides the argmax."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows the requests as they enter, leave and move in the batch."""
        process_dict_updates(self._rows, batch_update, _new_row)

    def apply(self, logits: Tensor) -> Tensor:
        """Replaces the rows of (requests, vocabulary) by 0 at the drawn token and -inf elsewhere."""
        if not self._rows:
            return logits
        rows = [self._rows[index] for index in range(len(logits))]
        draw = rows[0].draw  # the requests of one call share their settings
        uniforms = torch.stack([row.uniforms[len(row.output)] for row in rows])
        tokens = draw_tokens(
            without_repeats(logits, [row.output for row in rows], draw.presence_penalty),
            uniforms.to(logits.device),
            torch.tensor(draw.banned, dtype=torch.long, device=logits.device),
            temperature=draw.temperature,
            top_p=draw.top_p,
            top_k=draw.top_k,
        )
        return logits.fill_(float("-inf")).scatter_(1, tokens[:, None], 0.0)


def _new_row(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> _Row | None:
    if not params.extra_args or _KEY not in params.extra_args:
        return None
    draw = Draw(**params.extra_args[_KEY])
    return _Row(draw, row_uniforms(draw.seed, draw.sample, draw.max_tokens), output)
