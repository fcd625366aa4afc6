"""The one path from tokens to log-probs, for student, reference and every teacher, with and without gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cepo.data.batch import ScoringRow
from cepo.losses.divergence import chunked_divergence
from cepo.models import family
from cepo.models.positions import context_positions, sequence_positions
from cepo.models.processing import ImageInputs, Processing
from cepo.types import DivergenceConfig

HEAD_CHUNK_ELEMENTS = 2**25
"""Logits held at once (float32: 128 MiB). The head runs over tokens in chunks of this many elements / vocabulary."""

DIVERGENCE_CHUNK_ELEMENTS = 9 * 2**20
"""As above, for a divergence, which holds both distributions, their mixture and their gradients at once. A chunk stays above the
32 MiB up to which glibc keeps freed blocks on its heap, where they would add up to the memory of a dense computation."""


@dataclass(frozen=True, kw_only=True)
class CollatedRows:
    """Right-padded rows. Padding stands behind everything it could influence, so causal attention needs no mask.

    Attributes:
        input_ids: (R, L).
        position_ids: (3, R, L).
        response_index: (N,) places in the flattened (R * L) hidden states that predict the N response tokens, row by row.
        targets: (N,) the response tokens.
        pixel_values, grid_thw: of the distinct pictures; None without any.
        image_order: for each picture, row by row, its index among the distinct ones.
        is_frame: for each distinct picture whether it is part of a video.
    """

    input_ids: Int64[Tensor, "R L"]
    position_ids: Int64[Tensor, "3 R L"]
    response_index: Int64[Tensor, " N"]
    targets: Int64[Tensor, " N"]
    pixel_values: Tensor | None
    grid_thw: Tensor | None
    image_order: tuple[int, ...]
    is_frame: tuple[bool, ...] = ()


def collate(rows: Sequence[ScoringRow], *, processing: Processing, device: torch.device) -> CollatedRows:
    """Brings rows into tensors on `device`; contexts and pictures that rows share are handled once."""
    longest = max(row.num_tokens for row in rows)
    input_ids = torch.full((len(rows), longest), processing.pad_token_id)
    position_ids = torch.zeros(3, len(rows), longest, dtype=torch.long)
    places: list[Tensor] = []
    positions: dict[int, Tensor] = {}
    distinct: dict[int, tuple[int, ImageInputs]] = {}
    order: list[int] = []
    num_images = 0
    for index, row in enumerate(rows):
        context, length = row.context, row.num_tokens
        if id(context) not in positions:
            positions[id(context)] = context_positions(
                context.token_ids,
                context.images,
                image_token_id=processing.image_token_id,
                merge_size=processing.merge_size,
                video_token_id=processing.video_token_id,
            )
        input_ids[index, :length] = torch.tensor((*context.token_ids, *row.response_ids))
        position_ids[:, index, :length] = sequence_positions(positions[id(context)], len(row.response_ids))
        places.append(torch.arange(len(context.token_ids) - 1, length - 1) + index * longest)
        if context.images is not None:
            if id(context.images) not in distinct:
                distinct[id(context.images)] = (num_images, context.images)
                num_images += len(context.images.grid_thw)
            first = distinct[id(context.images)][0]
            order.extend(range(first, first + len(context.images.grid_thw)))
    images = [image for _, image in distinct.values()]
    return CollatedRows(
        input_ids=input_ids.to(device),
        position_ids=position_ids.to(device),
        response_index=torch.cat(places).to(device),
        targets=torch.tensor([token for row in rows for token in row.response_ids]).to(device),
        pixel_values=torch.cat([image.pixel_values for image in images]).to(device) if images else None,
        grid_thw=torch.cat([image.grid_thw for image in images]).to(device) if images else None,
        image_order=tuple(order),
        is_frame=tuple(flag for image in images for flag in image.is_frame),
    )


def response_states(base: Any, batch: CollatedRows) -> Float[Tensor, "N H"]:
    """The last hidden states before the N response tokens, row by row, of the Hugging Face model `base`."""
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
    inputs["position_ids"] = batch.position_ids if family.is_multimodal(base.config) else batch.position_ids[0]
    if batch.pixel_values is not None:
        assert batch.grid_thw is not None
        inputs |= family.encode_images(base, batch.pixel_values, batch.grid_thw, batch.image_order, batch.is_frame)
    hidden = base.model(**inputs).last_hidden_state
    return hidden.reshape(-1, hidden.shape[-1])[batch.response_index]


@dataclass(frozen=True, kw_only=True)
class TeacherStates:
    """What a divergence needs of the teacher.

    Attributes:
        hidden: (N, H) the teacher's last hidden states before the N response tokens.
        head: (V, H) the teacher's own head; None where it is the student's.
        divergence: how far the student is from it.
    """

    hidden: Float[Tensor, "N H"]
    head: Float[Tensor, "V H"] | None
    divergence: DivergenceConfig


class ScoringModel(nn.Module):
    """log P of each response token. The root of the sharded model, so that the head's weight is whole inside `forward`.

    `log_probs_n = z_n[y_n] - logsumexp(z_n)` with `z_n = W h_n / temperature` in float32, W the LM head and h_n the last
    hidden state before token y_n. The head runs on response positions alone, in chunks, and is recomputed in the backward
    pass: no tensor of tokens x vocabulary outlives its chunk.
    """

    def __init__(self, model: nn.Module, *, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature

    @property
    def base(self) -> Any:
        """The Hugging Face model, under PEFT's wrapper if there is one."""
        model: Any = self.model
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    def forward(
        self, batch: CollatedRows, teachers: Sequence[TeacherStates] = ()
    ) -> tuple[Float[Tensor, " N"], tuple[Tensor, ...]]:
        """log-probs of all response tokens of the batch, row by row, and beside them

        without teachers the hidden states (N, H) they come from, else the divergence (N,) from each teacher.
        """
        hidden = response_states(self.base, batch)
        if not teachers:
            return self._head(hidden, batch.targets), (hidden,)
        parts = [self._divergence(hidden, teacher, batch.targets) for teacher in teachers]
        return parts[0][0], tuple(divergence for _, divergence in parts)

    def _divergence(
        self, hidden: Float[Tensor, "N H"], teacher: TeacherStates, targets: Int64[Tensor, " N"]
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        head = self.base.lm_head
        return chunked_divergence(
            hidden,
            teacher.hidden.to(hidden),
            head,
            head if teacher.head is None else teacher.head.to(hidden),
            targets,
            teacher.divergence,
            temperature=self.temperature,
            chunk_tokens=max(1, DIVERGENCE_CHUNK_ELEMENTS // head.weight.shape[0]),
        )

    def _head(self, hidden: Float[Tensor, "N H"], targets: Int64[Tensor, " N"]) -> Float[Tensor, " N"]:
        head = self.base.lm_head
        chunk = max(1, HEAD_CHUNK_ELEMENTS // head.weight.shape[0])
        pieces = []
        for part, wanted in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            if torch.is_grad_enabled():
                pieces.append(checkpoint(self._chunk_log_probs, part, wanted, use_reentrant=False))
            else:
                pieces.append(self._chunk_log_probs(part, wanted))
        return torch.cat(pieces)

    def _chunk_log_probs(self, hidden: Float[Tensor, "n H"], targets: Int64[Tensor, " n"]) -> Float[Tensor, " n"]:
        logits = self.base.lm_head(hidden).float() / self.temperature
        return logits.gather(1, targets.unsqueeze(1)).squeeze(1) - logits.logsumexp(dim=1)
