"""Conversations and images that a cell holds as a text are read, or refused by what they are: never a question, never a path."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from case_files import cases
from image_files import encoded
from PIL import Image

from cepo.data.row_parser import read_cells
from cepo.data.row_settings import CellRules
from cepo.data.rows import Fields
from cepo.errors import DataError

CONVERSATIONS: list[Any] = cases(__file__, "written_cells.yaml")
IMAGES: list[Any] = cases(__file__, "written_media.yaml")
CELLS = CellRules()


def name_of(case: Any) -> str:
    return case["name"]


@pytest.mark.parametrize("case", CONVERSATIONS, ids=name_of)
def test_a_conversation_as_a_text_is_read_or_refused(case: Any) -> None:
    row: Fields = {"prompt": case["cell"], "answer": "2"}
    if "refused" in case:
        with pytest.raises(DataError, match=case["refused"]):
            read_cells(row, CELLS)
        return
    assert read_cells(row, CELLS).turns[-1].text == case["question"]


def test_the_answer_of_a_conversation_as_a_text_is_its_last_turn() -> None:
    turns = [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": "2"}]
    rules = CellRules(prompt_key="messages", answer_key="messages")
    for text in (json.dumps(turns), repr(turns)):
        cells = read_cells({"messages": text}, rules)
        assert cells.turns[-1].text == "What is 1+1?"
        assert cells.answer == "2"


@pytest.mark.parametrize("case", IMAGES, ids=name_of)
def test_images_as_a_text_are_read_or_refused(case: Any, tmp_path: Path) -> None:
    from cepo.data.images import ImageRules, decoded_images

    content = encoded(Image.new("RGB", (8, 8), "red"))
    for name in ("red.png", "blue.png", "[1] (2).png"):
        (tmp_path / name).write_bytes(content)
    in_base64 = base64.b64encode(content).decode()
    text = case["cell"].replace("BYTES", repr(content)).replace("BASE64", in_base64)
    row: Fields = {"prompt": "?", "answer": "2", "images": text}
    rules = ImageRules(image_dir=str(tmp_path))

    def number_of_images() -> int:
        images = read_cells(row, CELLS).images
        return len(decoded_images(images, "images", rules))

    if "refused" in case:
        with pytest.raises(DataError, match=case["refused"]):
            number_of_images()
        return
    assert number_of_images() == case["count"]
