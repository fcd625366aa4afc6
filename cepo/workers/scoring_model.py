"""Computes log-probabilities for student, reference and teachers, and a critic's values, with or without gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from cepo.data.batch import ScoringRow
from cepo.losses.divergence import chunked_divergence
from cepo.models.families import family_of
from cepo.models.head import (
    divergence_chunk_tokens,
    head_chunk_tokens,
    output_head,
    replaced_weight,
    target_log_probs,
)
from cepo.models.head_entropy import log_probs_and_entropies
from cepo.models.interface import ImageFeatures, ImageInputs, sequence_positions
from cepo.models.pretrained import frozen_vision_parts, share_segments
from cepo.models.processing import Processing
from cepo.models.segments import SegmentLayout
from cepo.models.without_waiting import to_device
from cepo.types import DivergenceConfig
from cepo.workers.batching import PrefixTree, Segment

HEAD_SCALE = 0.01
"""Standard deviation of untrained values for hidden states of unit size, so that initial values are close to 0."""


@dataclass(frozen=True, kw_only=True)
class CollatedRows:
    """A batch of right-padded rows or, with `segments`, one packed row in which shared tokens occur once (R = 1).

    Causal attention cannot see padding on the right, so padded rows need no mask.

    Attributes:
        input_ids: (R, L).
        position_ids: (3, R, L).
        response_index: (N,) indices, into the flattened (R * L) hidden states, of those that predict the N response
            tokens, row by row.
        targets: (N,) the response tokens.
        images: the distinct images by content. No plain `dict`, because FSDP rebuilds those among the arguments of its
            modules, and casts every float in them.
        image_order: for each unit of images in the input, row by row, its image's key and its index there.
        segments: the layout of a packed row; None for padded rows.
    """

    input_ids: Int64[Tensor, "R L"]
    position_ids: Int64[Tensor, "3 R L"]
    response_index: Int64[Tensor, " N"]
    targets: Int64[Tensor, " N"]
    images: Mapping[str, ImageInputs] = field(default_factory=dict)
    image_order: tuple[tuple[str, int], ...] = ()
    segments: SegmentLayout | None = None


def collate(
    rows: Sequence[ScoringRow],
    forest: PrefixTree | None = None,
    *,
    processing: Processing,
    device: torch.device,
    multiple_of: int = 1,
) -> CollatedRows:
    """Collates rows into padded tensors on `device` or, with their forest, into one packed row.

    In a packed row, shared tokens and images occur only once. Tokens keep the position ids that they have in their own row.

    Args:
        multiple_of: the packed row's length is padded to a multiple of this.
    """
    places = _padded_places(rows) if forest is None else _packed_places(rows, forest, multiple_of)
    num_rows, length = places.shape
    input_ids = torch.full((num_rows * length,), processing.pad_token_id)
    position_ids = torch.zeros(3, num_rows * length, dtype=torch.long)
    context_positions: dict[int, Tensor] = {}  # by the identity of the context, which many rows share
    images: dict[str, ImageInputs] = {}
    image_order: list[tuple[str, int]] = []
    for segment, begin in places.segments:
        row = rows[segment.row]
        context = row.context
        if id(context) not in context_positions:
            context_positions[id(context)] = processing.positions(context)
        positions = sequence_positions(context_positions[id(context)], len(row.response_ids))  # (3, L of the row)
        token_ids = (*context.token_ids, *row.response_ids.tolist())
        end = begin + len(segment)
        input_ids[begin:end] = torch.tensor(token_ids[segment.start : segment.stop])
        position_ids[:, begin:end] = positions[:, segment.start : segment.stop]
        if context.images is not None and segment.start < len(context.token_ids):
            assert processing.images is not None, "images were read"
            key = context.images.content_key
            images.setdefault(key, context.images)
            units = processing.images.units_inside(context.token_ids, context.images, segment.start, segment.stop)
            image_order.extend((key, unit) for unit in units)
    targets = numpy.concatenate([row.response_ids for row in rows])
    return CollatedRows(
        input_ids=to_device(input_ids.view(num_rows, length), device),
        position_ids=to_device(position_ids.view(3, num_rows, length), device),
        response_index=to_device(torch.cat(places.response_index), device),
        targets=to_device(torch.from_numpy(targets).long(), device),
        images=MappingProxyType(images),
        image_order=tuple(image_order),
        segments=places.layout,
    )


class _Places(NamedTuple):
    """Where the tokens of rows stand in a batch."""

    shape: tuple[int, int]  # of the batch: rows, length
    segments: list[tuple[Segment, int]]  # each with the index of its first token in the flattened batch
    response_index: list[Tensor]  # parts of `CollatedRows.response_index`
    layout: SegmentLayout | None = None


def _padded_places(rows: Sequence[ScoringRow]) -> _Places:
    length = max(row.num_tokens for row in rows)
    segments: list[tuple[Segment, int]] = []
    response_index: list[Tensor] = []
    for number, row in enumerate(rows):
        begin = number * length
        whole_row = Segment(row=number, start=0, stop=row.num_tokens, parent=-1)
        segments.append((whole_row, begin))
        # A token predicts its successor, so the context's last token is the first of these.
        first_predicting = begin + len(row.context.token_ids) - 1
        last_token = begin + row.num_tokens - 1
        response_index.append(torch.arange(first_predicting, last_token))
    return _Places(shape=(len(rows), length), segments=segments, response_index=response_index)


def _packed_places(rows: Sequence[ScoringRow], forest: PrefixTree, multiple_of: int) -> _Places:
    layout = forest.layout.filled_to(multiple_of)
    response_index: list[Tensor] = []
    for number, row in enumerate(rows):
        end_of_context = forest.starts[forest.context_ends[number] + 1]
        last_of_context = end_of_context - 1  # predicts the response's first token
        response_index.append(torch.tensor([last_of_context]))
        leaf = forest.leaves[number]
        if leaf >= 0:
            num_inputs = len(row.response_ids) - 1
            inputs = torch.arange(num_inputs) + forest.starts[leaf]
            response_index.append(inputs)
    begins = forest.starts[:-1]  # the last one is the end of all
    return _Places(
        shape=(1, layout.num_tokens),
        segments=list(zip(forest.segments, begins, strict=True)),
        response_index=response_index,
        layout=layout,
    )


class ImageEncoder:
    """Runs the vision tower once for each image of a batch or, if its weights are frozen (`keep`), until `forget`."""

    def __init__(self, *, keep: bool) -> None:
        self.keeps = keep
        self._known: dict[str, list[ImageFeatures]] = {}
        self._encoded = 0

    def features(
        self, base: Any, images: Mapping[str, ImageInputs], device: torch.device
    ) -> Mapping[str, list[ImageFeatures]]:
        """Returns the features of the units of each image by its key."""
        features_by_key = dict(self._known)
        missing = {key: inputs for key, inputs in images.items() if key not in features_by_key}
        if missing:
            missing_images = list(missing.values())
            self._encoded += sum(inputs.num_encoded for inputs in missing_images)
            family = family_of(base.config)
            has_gradient = torch.is_grad_enabled() and not self.keeps
            with torch.set_grad_enabled(has_gradient):
                features = family.features(base, missing_images, device)
            features_by_key.update(zip(missing, features, strict=True))
        if self.keeps:
            self._known = features_by_key
        return features_by_key

    def forget(self) -> None:
        self._known = {}

    def drain_count(self) -> int:
        """Returns the number of images encoded since the last call."""
        count = self._encoded
        self._encoded = 0
        return count


def response_states(base: Any, batch: CollatedRows, encoder: ImageEncoder) -> Float[Tensor, "N H"]:
    """Computes the last hidden states of `base`, a Hugging Face model, before the N response tokens, row by row."""
    family = family_of(base.config)
    position_ids = batch.position_ids  # (3, R, L) in time, height and width
    if family.num_position_axes == 1:
        position_ids = position_ids[0]  # (R, L)
    inputs: dict[str, Any] = {
        "input_ids": batch.input_ids,
        "position_ids": position_ids,
        "use_cache": False,
        **family.token_inputs(batch.input_ids, base.config),
    }
    if batch.segments is not None:
        inputs["segments"] = batch.segments
    if batch.image_order:
        features = encoder.features(base, batch.images, batch.input_ids.device)
        units_in_order = [features[key][unit] for key, unit in batch.image_order]
        inputs |= family.feature_inputs(units_in_order)
    hidden = base.model(**inputs).last_hidden_state  # (R, L, H)
    flat_hidden = hidden.reshape(-1, hidden.shape[-1])  # (R * L, H)
    return flat_hidden[batch.response_index]


@dataclass(frozen=True, kw_only=True)
class TeacherStates:
    """The teacher's last hidden states before the N response tokens, and its head; None if it is the student's."""

    hidden: Float[Tensor, "N H"]
    head: Float[Tensor, "V H"] | None
    divergence: DivergenceConfig


class TokenScores(NamedTuple):
    """What a pass finds of its N response tokens, row by row. A tuple, in which FSDP finds the tensors with a gradient."""

    log_probs: Float[Tensor, " N"]
    hidden: Float[Tensor, "N H"]  # the last hidden states before the tokens
    entropies: Float[Tensor, " N"] | None  # of the tokens' distributions in nats; None if not asked for
    divergence: Float[Tensor, " N"] | None  # from the teacher; None without one


class ScoringModel(nn.Module):
    """Computes the log-probability of each response token.

    `log_probs_n = z_n[y_n] - logsumexp(z_n)` with `z_n = W h_n / temperature` in float32, W the LM head and h_n the
    last hidden state before token y_n. The head runs in chunks, so no tensor of tokens x vocabulary outlives its chunk.
    As this is the root of the sharded model, the head is whole inside `forward`.

    `why_padded` is the reason why a batch must not be a packed row; None if it may be.
    """

    def __init__(self, model: nn.Module, *, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.why_padded = share_segments(self.base)
        self.encoder = ImageEncoder(keep=bool(frozen_vision_parts(self.base)))

    @property
    def base(self) -> Any:
        """The Hugging Face model, without PEFT's wrapper."""
        model: Any = self.model
        if hasattr(model, "get_base_model"):
            return model.get_base_model()
        return model

    def forward(
        self,
        batch: CollatedRows,
        teacher: TeacherStates | None = None,
        *,
        entropy: bool = False,
        temperature: float | None = None,
    ) -> TokenScores:
        """Scores all response tokens; `temperature` replaces the usual one."""
        head = output_head(self.base)
        hidden = response_states(self.base, batch, self.encoder)  # (N, H)
        temperature = temperature or self.temperature
        chunk_tokens = head_chunk_tokens(hidden.device, head.weight.shape[0])
        log_probs: Tensor | None = None
        entropies: Tensor | None = None
        divergence: Tensor | None = None
        if entropy:
            log_probs, entropies = log_probs_and_entropies(
                hidden, head, batch.targets, temperature=temperature, chunk_tokens=chunk_tokens
            )
        if teacher is not None:
            teacher_head = head if teacher.head is None else replaced_weight(head, teacher.head.to(hidden))
            log_probs, divergence = chunked_divergence(
                hidden,
                teacher.hidden.to(hidden),
                head,
                teacher_head,
                batch.targets,
                teacher.divergence,
                temperature=temperature,
                chunk_tokens=divergence_chunk_tokens(hidden.device, vocabulary=head.weight.shape[0]),
            )
        if log_probs is None:
            log_probs = target_log_probs(
                hidden, head, batch.targets, temperature=temperature, chunk_tokens=chunk_tokens
            )
        return TokenScores(log_probs, hidden, entropies, divergence)


class ValueModel(nn.Module):
    """Computes the value before each response token. It is the root of the sharded model.

    `V_n = w . h_n + b` in float32, with h_n the last hidden state before token n. `w` is drawn from `seed` and `b` is
    initially 0; both are float32 whatever the body's type. For `why_padded` see `ScoringModel`.
    """

    def __init__(self, model: Any, *, seed: int) -> None:
        super().__init__()
        self.model = model
        self.why_padded = share_segments(model)
        self.encoder = ImageEncoder(keep=bool(frozen_vision_parts(model)))
        hidden_size = model.get_input_embeddings().weight.shape[1]
        self.head = nn.Linear(hidden_size, 1, dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(1, hidden_size, generator=generator)
        initial_weight = drawn * HEAD_SCALE / math.sqrt(hidden_size)
        with torch.no_grad():
            self.head.weight.copy_(initial_weight)
            self.head.bias.zero_()

    def forward(self, batch: CollatedRows) -> Float[Tensor, " N"]:
        """Returns the values of all response tokens of the batch, row by row."""
        hidden = response_states(self.model, batch, self.encoder)  # (N, H)
        values = self.head(hidden.float())  # (N, 1)
        return values.squeeze(1).clone()  # FSDP2 hooks into the root's output and warns about views
