"""The rollout engine and the trainer see a photograph in the same position, whatever its file says about it."""

from __future__ import annotations

import base64
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from generator_cases import picture
from image_files import encoded, exif
from json_files import write_lines
from PIL import Image
from training_runs import TWO_TEACHERS, Train

pytestmark = pytest.mark.heavy

PHOTO = picture(7, (96, 64))
FORMS: dict[str, Callable[[int], bytes]] = {
    "JPEG": lambda orientation: encoded(PHOTO, "JPEG", exif=exif(orientation)),
    "PNG": lambda orientation: encoded(on_a_transparent_ground(), exif=exif(orientation)),
    "WebP": lambda orientation: encoded(PHOTO, "WEBP", exif=exif(orientation)),
    "TIFF": lambda orientation: encoded(PHOTO, "TIFF", exif=exif(orientation)),
}


def on_a_transparent_ground() -> Image.Image:
    image = PHOTO.convert("RGBA")
    image.putalpha(PHOTO.convert("1").convert("L"))
    return image


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """32 rows: four formats in eight orientations."""
    images = [base64.b64encode(form(number)).decode() for form in FORMS.values() for number in range(1, 9)]
    rows = [
        {"problem": "<image>What is it?", "answer": str(row), "images": [image]} for row, image in enumerate(images)
    ]
    return write_lines(tmp_path_factory.mktemp("photographs") / "rows.jsonl", rows)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_samples_what_is_trained_on_in_every_orientation(train: Train, photographs: Path) -> None:
    """In one step over all 32 files, no log-prob differs by 1e-4; turned twice, they differ by up to 4.85."""
    finished = train(
        *TWO_TEACHERS,
        f"data.train_files={photographs}",
        "data.shuffle=false",
        "data.min_pixels=4096",
        "data.rollout_batch_size=32",
        "worker.actor.global_batch_size=32",
        "trainer.max_steps=1",
        "worker.actor.fsdp.mp_param_dtype=fp32",
        "worker.rollout.dtype=fp32",
        "worker.rollout.name=vllm",
    )
    (row,) = finished.metrics
    assert 0 < row["rollout/log_prob_gap_max"] < 1e-4
