"""The mask that both trainers use for all prompts, because a mask depends on a prompt's name, which they choose themselves."""

from cepo.models.patch_mask import PatchMask
from cepo.types import ImageReference, RolloutGroup


def one_mask(_: RolloutGroup, reference: ImageReference) -> PatchMask:
    assert reference.masked is not None
    return PatchMask(probability=reference.masked, seed="one mask", square=reference.square)
