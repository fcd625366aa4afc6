"""The images of a row are checked as they are used, found beside the data, and named in errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import encoded, exif
from PIL import Image

from cepo.config.schema import DataConfig
from cepo.data.dataset import ProblemSet
from cepo.data.image_store import ImageStore
from cepo.data.images import ImageRules, checked_sizes, decoded_images, limited_size
from cepo.data.row_settings import RowRules
from cepo.errors import ConfigError, DataError
from cepo.models.interface import ImageSource
from cepo.models.processing import Processing

Read = Callable[..., ProblemSet]
SQUARE = Image.new("L", (64, 64), 9)


def config(folder: Path, **settings: Any) -> DataConfig:
    usual: dict[str, Any] = {"train_files": str(folder / "rows.jsonl"), "prompt_key": "problem", "min_pixels": None}
    usual |= {"image_dir": str(folder), "max_prompt_length": 100_000}
    return DataConfig(**(usual | settings))


@pytest.fixture
def read(tmp_path: Path, tiny_processing: Processing) -> Read:
    """Reads rows of images, given as files in the folder of the test."""

    def reader(*rows: dict[str, Any], **settings: Any) -> ProblemSet:
        lines: list[str] = []
        for row in rows:
            marks = "<image>" * len(row.get("images", []))
            lines.append(json.dumps({"problem": f"{marks}?", "answer": "1"} | row) + "\n")
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(lines), encoding="utf-8")
        return ProblemSet(str(file), config(tmp_path, **settings), tiny_processing)

    return reader


def test_a_column_of_images_that_is_not_there_is_named(read: Read, caplog: pytest.LogCaptureFixture) -> None:
    """Questions without marks say nothing of their images, and a model would be trained without seeing them."""
    row = {"problem": "?", "Image": "good.png"}
    with pytest.raises(ConfigError, match=r"data\.image_key is 'image', which .* does not have\. Its columns: .*Image"):
        read(row, image_key="image", image_marks="front")
    assert len(read(row, image_key="image")) == 1
    assert (
        "no question has an image: data.image_key is 'image', and the columns are problem, answer, Image" in caplog.text
    )
    caplog.clear()
    assert len(read({"images": []})) == 1
    assert "no question has an image" not in caplog.text, "there is a column for them"


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
    SQUARE.save(tmp_path / "good.png")
    Image.new("L", size, 200).save(tmp_path / "thin.png")
    rows = [{"images": ["good.png"]}, {"images": ["thin.png"]}]
    with pytest.raises(DataError, match=rf"rows\.jsonl, row 1: column 'images': the image 'thin\.png' is .*({fault})"):
        read(*rows, **limits)
    problems = read(*rows, skip_bad_rows=True, **limits)
    assert [problem.prompt_id for problem in problems] == ["0"]


def test_the_check_says_the_size_that_is_used() -> None:
    """For sides of 1 to 512 pixels and any limits, both agree, or both refuse."""
    draw = np.random.default_rng(0)
    for _ in range(60):
        width = int(2 ** draw.uniform(0, 9))
        height = int(2 ** draw.uniform(0, 9))
        lowest, highest = sorted(int(2 ** draw.uniform(0, 16)) for _ in range(2))
        rules = ImageRules(min_pixels=lowest, max_pixels=highest)
        orientation = int(draw.integers(1, 9))
        content = encoded(Image.new("L", (width, height)), "WEBP", exif=exif(orientation))
        images = [{"bytes": content}]
        try:
            sizes = checked_sizes(images, "images", rules)
        except DataError as error:
            with pytest.raises(DataError, match=re.escape(str(error))):
                decoded_images(images, "images", rules)
            continue
        upright = (width, height) if orientation < 5 else (height, width)
        assert [image.size for image in decoded_images(images, "images", rules)] == sizes
        assert sizes[0] == limited_size(upright, lowest, highest)


def test_what_the_models_processor_refuses_is_a_bad_row(
    read: Read, tmp_path: Path, tiny_processing: Processing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own limit may be another one than ours: here no side may be shorter than 32 pixels."""
    SQUARE.save(tmp_path / "good.png")
    Image.new("L", (64, 16)).save(tmp_path / "low.png")
    processor: Any = tiny_processing._processor.image_processor
    plain = processor.get_number_of_image_patches

    def strict(height: int, width: int, options: Any) -> int:
        if min(height, width) < 32:
            raise ValueError(f"height:{height} and width:{width} must be larger than factor:32")
        return plain(height, width, options)

    monkeypatch.setattr(processor, "get_number_of_image_patches", strict)
    good = {"images": ["good.png"]}
    low = {"images": ["low.png"]}
    low_crop = {"images": ["good.png"], "crops": ["low.png"]}
    with pytest.raises(DataError, match=r"row 1: the model's processor refuses images of 64 x 16 pixels \(height:16"):
        read(good, low)
    for row in (low, low_crop):
        assert len(read(good, row, skip_bad_rows=True, teacher_image_key="crops")) == 1


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "TIFF"])
@pytest.mark.parametrize("fate", ["deleted", "cut", "replaced by text", "replaced by a thin image"])
def test_errors_after_the_check_name_row_column_and_file(
    read: Read, tmp_path: Path, tiny_processing: Processing, kind: str, fate: str
) -> None:
    """In the trainer, and in a process that reads the images itself."""
    file = tmp_path / f"figure.{kind.lower()}"
    noise = Image.effect_noise((64, 64), 50).convert("RGB")
    noise.save(tmp_path / "good.png")
    whole = encoded(noise, kind)
    file.write_bytes(whole)
    rows = [{"images": ["good.png"]}, {"images": ["good.png"], "crops": [file.name]}]
    problems = read(*rows, teacher_image_key="crops")
    assert len(problems[1].teacher_images) == 1
    contents = {
        "cut": whole[:700],
        "replaced by text": b"text",
        "replaced by a thin image": encoded(Image.new("L", (900, 1))),
    }
    if fate == "deleted":
        file.unlink()
    else:
        file.write_bytes(contents[fate])
    named = rf"rows\.jsonl, row 1: column 'crops': the image 'figure\.{kind.lower()}' "
    with pytest.raises(DataError, match=named):
        problems[1]
    store = ImageStore(RowRules.of(config(tmp_path, teacher_image_key="crops")), tiny_processing)
    with pytest.raises(DataError, match=named):
        store.images(ImageSource(data=str(tmp_path / "rows.jsonl"), row=1, column="crops"))
    assert len(problems[0].images) == 1, "other rows are read"


# Images beside the data


@pytest.mark.parametrize(
    ("data", "image", "path", "folder"),
    [
        ("set/rows.jsonl", "set/images/1.png", "images/1.png", "set"),
        ("set/rows.jsonl", "set/1.png", "1.png", "set"),
        ("set/rows.jsonl", "set/images/1.png", "1.png", "set/images"),
        ("set/annotations/rows.jsonl", "set/images/1.png", "images/1.png", "set"),
        ("set/data/train/rows.jsonl", "set/images/1.png", "images/1.png", "set"),
    ],
)
def test_an_image_beside_the_data_names_its_folder(
    tmp_path: Path, tiny_processing: Processing, data: str, image: str, path: str, folder: str
) -> None:
    for name in (data, image):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    SQUARE.save(tmp_path / image)
    row = {"prompt": "<image>?", "answer": "1", "images": [path]}
    (tmp_path / data).write_text(json.dumps(row), encoding="utf-8")
    expected = tmp_path / folder
    for source in (str(tmp_path / data), f"{tmp_path / data}@train[:1]", str((tmp_path / data).parent)):
        rules = DataConfig(train_files=source)
        with pytest.raises(
            DataError, match=rf"'{path}' does not exist\. It lies in {expected}: set data.image_dir={expected}"
        ):
            ProblemSet(source, rules, tiny_processing)
    rules = DataConfig(train_files=data, image_dir=str(expected))
    assert len(ProblemSet(str(tmp_path / data), rules, tiny_processing)[0].images) == 1


def test_the_image_that_is_missing_is_looked_for(tmp_path: Path, tiny_processing: Processing) -> None:
    """The first image of the row lies in `image_dir`."""
    for name in ("images/1.png", "set/2.png"):
        (tmp_path / name).parent.mkdir()
        SQUARE.save(tmp_path / name)
    row = {"prompt": "<image><image>?", "answer": "1", "images": ["1.png", "2.png"]}
    data = tmp_path / "set" / "rows.jsonl"
    data.write_text(json.dumps(row), encoding="utf-8")
    rules = DataConfig(train_files=str(data), image_dir=str(tmp_path / "images"))
    with pytest.raises(DataError, match=rf"'2\.png' does not exist\. It lies in {tmp_path / 'set'}: set"):
        ProblemSet(str(data), rules, tiny_processing)


def test_an_image_that_is_nowhere_has_no_such_hint(read: Read) -> None:
    with pytest.raises(DataError) as caught:
        read({"images": ["nowhere.png"]})
    assert "It lies in" not in str(caught.value)
