"""Builds rows for scoring and updates, and prompts for sampling, with a shape's lengths, random words and images."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from testing.shapes import Shape, prompt_text, random_image

if TYPE_CHECKING:
    from torch import Tensor

    from cepo.data.batch import CriticBatch, OptimizerBatch, ScoringRow
    from cepo.models.processing import Processing
    from cepo.rollout.generator import GenerationRequest

HINT_TOKENS = 20
"""The number of tokens by which a teacher's context is longer than the prompt."""


def skewed_lengths(shape: Shape, group_size: int) -> list[int]:
    """Returns quantiles of an exponential distribution: most are short, the last is the longest."""
    if group_size == 1:
        return [shape.longest]
    top = -math.log(0.5 / group_size)
    quantiles = [-math.log(1 - (number + 0.5) / group_size) / top for number in range(group_size)]
    return [round(shape.shortest + (shape.longest - shape.shortest) * quantile) for quantile in quantiles]


def build_rows(
    shape: Shape, processing: Processing, *, groups: int, group_size: int, contexts: int, prompt: int
) -> list[list[ScoringRow]]:
    """Returns, for each context, the rows of all groups; every group has its own image and random words."""
    import torch

    from cepo.data.batch import ScoringRow, token_array
    from cepo.models.families import GridReader
    from cepo.models.interface import EncodedPrompt, ImageInputs

    reader = processing.images
    assert isinstance(reader, GridReader), "the shapes are those of a model with a grid of patches"
    draw = torch.Generator().manual_seed(1)

    def words(number: int) -> tuple[int, ...]:
        return tuple(torch.randint(256, (number,), generator=draw).tolist())

    rows: list[list[ScoringRow]] = [[] for _ in range(contexts)]
    width, height = (reader.merge_size * side for side in shape.image)
    for _ in range(groups):
        pixels = torch.randn(height * width, 3 * 2 * 16 * 16, generator=draw)
        images = ImageInputs(tensors={"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])})
        begin = (*words(10), *[reader.image_token_id] * shape.image_tokens, *words(prompt - shape.image_tokens - 15))
        end = words(5)
        responses = [words(length) for length in skewed_lengths(shape, group_size)]
        for number in range(contexts):
            ids = (*begin, *(words(HINT_TOKENS) if number else ()), *end)
            context = EncodedPrompt(token_ids=ids, engine_ids=ids, images=images)
            rows[number] += [ScoringRow(context=context, response_ids=token_array(response)) for response in responses]
    return rows


def optimizer_batch(rows: list[ScoringRow]) -> OptimizerBatch:
    """Returns a batch of the rows as on-policy responses, with advantages of both signs."""
    import torch

    from cepo.data.batch import OptimizerBatch
    from cepo.losses.aggregation import LossDenominators

    lengths = torch.tensor([len(row.response_ids) for row in rows])
    mask = torch.arange(int(lengths.max())).unsqueeze(0) < lengths.unsqueeze(1)
    advantages = torch.linspace(-1, 1, len(rows)).unsqueeze(1).expand(mask.shape).where(mask, 0.0)
    return OptimizerBatch(
        rows=rows,
        sampled_log_probs=torch.zeros(mask.shape),
        advantages=advantages,
        response_mask=mask,
        denominators=LossDenominators(int(lengths.sum()), len(rows), int(lengths.max())),
    )


def critic_batch(rows: list[ScoringRow]) -> CriticBatch:
    """Returns a batch of the critic with the rows of `optimizer_batch`, its advantages as returns, and old values of 0."""
    import torch

    from cepo.data.batch import CriticBatch

    batch = optimizer_batch(rows)
    return CriticBatch(
        rows=rows,
        old_values=torch.zeros(batch.response_mask.shape),
        returns=batch.advantages,
        response_mask=batch.response_mask,
        denominators=batch.denominators,
    )


def gradients_of(actor: Any, batch: OptimizerBatch | CriticBatch) -> list[Tensor]:
    """Returns the unsharded gradient of the batch's loss for each trained weight, on the CPU; updates nothing.

    `actor` may be a critic, for a batch of its own.
    """
    from cepo.workers.distributed import whole_tensor
    from cepo.workers.training import weights_of

    actor.to_device()
    actor._accumulate(batch)
    gradients = [whole_tensor(weight.grad).float().cpu().clone() for weight in weights_of(actor.optimizer)]
    actor.forget_gradients()
    return gradients


def generation_requests(shape: Shape, processing: Processing, *, count: int) -> list[GenerationRequest]:
    """Returns prompts of the shape's length, each with its own image."""
    from cepo.rollout.generator import GenerationRequest

    requests: list[GenerationRequest] = []
    for number in range(count):
        image = random_image(shape, number)
        prompt = processing.encode(prompt_text(shape, processing, number), processing.load_images([image]))
        requests.append(
            GenerationRequest(
                prompt_ids=prompt.engine_ids, num_prompt_tokens=len(prompt.token_ids), images=(image,), seed=number
            )
        )
    return requests
