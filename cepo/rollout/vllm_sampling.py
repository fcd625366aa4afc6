"""Draws tokens for vLLM's CPU build with `cepo.rollout.transformers_generator`.

That build cannot seed requests: if a prompt is computed in several chunks, vLLM rewinds the request's random stream,
which a CPU stream does not support, and the engine fails. Here the token is drawn while vLLM processes the logits, and
is the only one left for vLLM's sampler. The raw log-probs have already been computed at this point.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates

from cepo.rollout.generator import SamplingSettings
from cepo.rollout.transformers_generator import draw_tokens

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate

DRAW = "cepo_draw"
"""The key of a request's `Draw` in `SamplingParams.extra_args`."""


@dataclass(frozen=True)
class Draw:
    uniforms: Tensor
    banned: Tensor
    settings: SamplingSettings


class SeededDraws(LogitsProcessor):
    """Excludes all tokens of each row except the one drawn by its own random stream."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[Draw, list[int]]] = {}  # with vLLM's own list, which grows with the response

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, _new_row)

    def apply(self, logits: Tensor) -> Tensor:
        """Sets each row of the logits, (requests, vocabulary), to 0 at the drawn token and -inf elsewhere."""
        if not self._rows:
            return logits
        draws: list[Draw] = []
        outputs: list[list[int]] = []
        uniforms: list[Tensor] = []
        for index in range(len(logits)):
            draw, output = self._rows[index]
            draws.append(draw)
            outputs.append(output)
            uniforms.append(draw.uniforms[len(output)])  # the next token's
        common = draws[0]  # the requests of one call share their settings
        tokens = draw_tokens(logits, outputs, torch.stack(uniforms), common.banned, common.settings)
        return logits.fill_(float("-inf")).scatter_(1, tokens[:, None], 0.0)


def _new_row(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> tuple[Draw, list[int]] | None:
    extra_args = params.extra_args or {}
    draw: Draw | None = extra_args.get(DRAW)
    return None if draw is None else (draw, output)
