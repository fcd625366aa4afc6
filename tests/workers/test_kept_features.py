"""The features of a frozen vision tower serve all passes of a step, and none of the next."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
from actors import build_actor
from PIL import Image

from cepo.data.batch import ScoringRow, token_array
from cepo.microgeo.world import ASSETS
from cepo.models.processing import Processing

pytestmark = pytest.mark.usefixtures("one_rank")


def test_features_of_images_are_freed_at_the_end_of_a_step() -> None:
    """Twice in a step the tower runs once; after the step it runs again, so that memory does not grow with the data."""
    folder = str(ASSETS)
    processing = Processing(folder)
    pixels = numpy.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=numpy.uint8)
    images = processing.load_images([Image.fromarray(pixels)])
    context = processing.encode("<image>Find x.", images)
    row = ScoringRow(context=context, response_ids=token_array([65, 66]))
    actor = build_actor(Path(folder), model__freeze_vision_tower="true")
    encoder = actor.module.encoder
    assert encoder.keeps
    actor.score([row])
    actor.score([row])
    assert encoder.drain_count() == 1
    actor.finish_step(0)
    actor.score([row])
    assert encoder.drain_count() == 1, "nothing is kept from the step before"
