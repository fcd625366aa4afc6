"""Draws tokens for vLLM's CPU build with `cepo.rollout.token_sampling`.

That build cannot seed requests: if a prompt is computed in several chunks, vLLM rewinds the request's random stream,
which a CPU stream does not support, and the engine fails. Here the token is drawn while vLLM processes the logits, and
is the only one left for vLLM's sampler. The raw log-probs have already been computed at this point.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

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
    """The sampling settings of one request, passed in `SamplingParams.extra_args`."""

    seed: int
    sample: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    presence_penalty: float
    banned: list[int] = field(repr=False)

    def extra_args(self) -> dict[str, object]:
        """Returns the settings as `SeededDraws` reads them."""
        return {_KEY: asdict(self)}


@dataclass(frozen=True)
class _Row:
    draw: Draw
    uniforms: Tensor
    output: list[int]  # vLLM's own list, which grows with the response


class SeededDraws(LogitsProcessor):
    """Excludes all tokens of each row except the one drawn by its own random stream."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        """Returns False because the draw decides the argmax."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Tracks requests that enter, leave or move in the batch."""
        process_dict_updates(self._rows, batch_update, _new_row)

    def apply(self, logits: Tensor) -> Tensor:
        """Sets each row of the logits, (requests, vocabulary), to 0 at the drawn token and -inf elsewhere."""
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
