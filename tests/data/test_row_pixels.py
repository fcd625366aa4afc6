"""The images of a row are checked as they are used, stay within bounds while they are read, and are named in errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import encoded, exif, grey_png
from PIL import Image

from cepo.config.schema import DataConfig
from cepo.data.dataset import ProblemSet
from cepo.data.image_store import ImageStore
from cepo.data.images import (
    ImageRules,
    checked_sizes,
    decoded_images,
    limited_size,
    load_rgb,
)
from cepo.data.row_settings import ProblemRules, RowRules
from cepo.errors import DataError
from cepo.models.interface import ImageSource
from cepo.models.processing import Processing

Read = Callable[..., ProblemSet]


@pytest.fixture
def read(tmp_path: Path, tiny_processing: Processing) -> Read:
    """Reads rows of images, given as files in the folder of the test."""

    def reader(*rows: Any, **settings: Any) -> ProblemSet:
        file = tmp_path / "rows.jsonl"
        lines = [row if isinstance(row, dict) else {"images": row} for row in rows]
        lines = [{"problem": "<image>" * len(line["images"]) + "?", "answer": "1"} | line for line in lines]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return ProblemSet(str(file), ProblemRules.of(config(tmp_path, **settings)), tiny_processing)

    return reader


def config(folder: Path, **settings: Any) -> DataConfig:
    usual: dict[str, Any] = {"train_files": str(folder / "rows.jsonl"), "prompt_key": "problem", "min_pixels": None}
    return DataConfig(**(usual | {"image_dir": str(folder), "max_prompt_length": 100_000} | settings))


@pytest.mark.parametrize(
    ("size", "limits", "fault"),
    [
        ((1999, 10), {"max_pixels": 8000}, r"1264 x 6 within data\.min_pixels=null and data\.max_pixels=8000"),
        ((10, 1999), {"max_pixels": 8000}, "6 x 1264 within"),
        ((1999, 10), {"max_pixels": 8000, "min_pixels": 7500}, r"1264 x 6 within data\.min_pixels=7500 and"),
        ((201, 1), {"min_pixels": 4096}, "201 x 1; accepted: sides in a ratio of at most 200"),
        ((600, 3), {"max_pixels": 600}, "346 x 1 within"),
    ],
)
def test_thin_images_are_bad_rows_by_the_size_they_get(
    read: Read, tmp_path: Path, size: tuple[int, int], limits: dict[str, int], fault: str
) -> None:
    """1999 x 10 has the ratio 199.9, and within 8,000 pixels 1264 x 6: 210.7."""
    Image.new("L", (64, 64), 9).save(tmp_path / "good.png")
    Image.new("L", size, 200).save(tmp_path / "thin.png")
    with pytest.raises(DataError, match=rf"rows\.jsonl, row 1: column 'images': the image 'thin\.png' is .*({fault})"):
        read(["good.png"], ["thin.png"], **limits)
    problems = read(["good.png"], ["thin.png"], skip_bad_rows=True, **limits)
    assert [problem.prompt_id for problem in problems] == ["0"]


def test_the_check_says_the_size_that_is_used() -> None:
    """For sides of 1 to 3,000 pixels and any limits, both agree, or both refuse."""
    random = np.random.default_rng(0)
    for _ in range(60):
        width, height = (int(2 ** random.uniform(0, 9)) for _ in range(2))
        lowest, highest = sorted(int(2 ** random.uniform(0, 16)) for _ in range(2))
        rules = ImageRules(min_pixels=lowest, max_pixels=highest)
        orientation = int(random.integers(1, 9))
        row = {"images": [{"bytes": encoded(Image.new("L", (width, height)), "WEBP", exif=exif(orientation))}]}
        try:
            sizes = checked_sizes(row, "images", rules)
        except DataError as error:
            with pytest.raises(DataError, match=re.escape(str(error))):
                decoded_images(row, "images", rules)
            continue
        assert [image.size for image in decoded_images(row, "images", rules)] == sizes
        assert sizes[0] == limited_size((width, height) if orientation < 5 else (height, width), lowest, highest)


def test_what_the_models_processor_refuses_is_a_bad_row(
    read: Read, tmp_path: Path, tiny_processing: Processing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own limit may be another one than ours: here no side may be shorter than 32 pixels."""
    Image.new("L", (64, 64)).save(tmp_path / "good.png")
    Image.new("L", (64, 16)).save(tmp_path / "low.png")
    processor: Any = tiny_processing._processor.image_processor
    plain = processor.get_number_of_image_patches

    def strict(height: int, width: int, options: Any) -> int:
        if min(height, width) < 32:
            raise ValueError(f"height:{height} and width:{width} must be larger than factor:32")
        return plain(height, width, options)

    monkeypatch.setattr(processor, "get_number_of_image_patches", strict)
    with pytest.raises(DataError, match=r"row 1: the model's processor refuses images of 64 x 16 pixels \(height:16"):
        read(["good.png"], ["low.png"])
    for row in ({"images": ["low.png"]}, {"images": ["good.png"], "crops": ["low.png"]}):
        problems = read(["good.png"], row, skip_bad_rows=True, teacher_image_key="crops")
        assert len(problems) == 1


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "TIFF"])
@pytest.mark.parametrize("fate", ["deleted", "cut", "replaced by text", "replaced by a thin image"])
def test_errors_after_the_check_name_row_column_and_file(
    read: Read, tmp_path: Path, tiny_processing: Processing, kind: str, fate: str
) -> None:
    """In the trainer, and in a process that reads the images itself."""
    file = tmp_path / f"figure.{kind.lower()}"
    noise = Image.effect_noise((64, 64), 50).convert("RGB")
    noise.save(tmp_path / "good.png")
    file.write_bytes(encoded(noise, kind))
    problems = read(["good.png"], {"images": ["good.png"], "crops": [file.name]}, teacher_image_key="crops")
    assert len(problems[1].teacher_images) == 1
    if fate == "deleted":
        file.unlink()
    else:
        file.write_bytes(
            {"cut": file.read_bytes()[:700], "replaced by text": b"text"}.get(fate, encoded(Image.new("L", (900, 1))))
        )
    named = rf"rows\.jsonl, row 1: column 'crops': the image 'figure\.{kind.lower()}' "
    with pytest.raises(DataError, match=named):
        problems[1]
    store = ImageStore(RowRules.of(config(tmp_path, teacher_image_key="crops")), tiny_processing)
    with pytest.raises(DataError, match=named):
        store.images(ImageSource(data=str(tmp_path / "rows.jsonl"), row=1, column="crops"))
    assert len(problems[0].images) == 1, "other rows are read"


def test_a_row_may_hold_so_many_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three images of 100 x 100 hold 30,000 pixels, within a limit of 2,500 only 7,500."""
    row: Mapping[str, Any] = {"images": [{"bytes": grey_png(100)}] * 3}
    monkeypatch.setattr("cepo.data.images.MOST_HELD", 29_999)
    assert len(checked_sizes(row, "images", ImageRules(max_pixels=2500))) == 3
    with pytest.raises(DataError, match=r"column 'images': .* have 30,000 pixels .*Lower data\.max_pixels"):
        checked_sizes(row, "images", ImageRules())


def test_an_image_loaded_twice_is_the_same() -> None:
    """What is loaded, written as PNG and loaded again is equal: nothing is applied a second time."""
    random = np.random.default_rng(1)
    for mode in ("RGBA", "LA", "L", "P", "CMYK"):
        stored = Image.fromarray(random.integers(0, 255, (24, 40, 4), dtype=np.uint8)).convert(mode)
        once = load_rgb(encoded(stored, "TIFF", exif=exif(6)), None)
        assert load_rgb(encoded(once), None).tobytes() == once.tobytes()
