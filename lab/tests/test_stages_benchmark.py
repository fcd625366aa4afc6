"""lab/stages.py at the smallest shape: what a stage passes, what its profile counts, and what both say of teachers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from lab import stages
from lab.support.model_flops import PATCH_VALUES
from lab.support.profiling import LISTED_OPERATIONS, profile_tables
from lab.support.rows import HINT_TOKENS
from lab.support.shapes import MICRO

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the trainer takes the GPU; figures are of a CPU")

ROWS, PICTURE_PATCHES = 8, 4 * MICRO.image_tokens
PATCH_FLOPS = 2 * PICTURE_PATCHES * PATCH_VALUES * MICRO.vision_hidden
"""The tower's patch embedding is a convolution."""


def told(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    monkeypatch.setattr("sys.argv", ["stages", "--shape", "micro", *arguments])
    return stages.arguments()


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        scoring = ("score student", "teachers", "score all")
        found = stages.measure(told(patch, "--repeats", "1", "--profile", "--stages", *scoring))
    return json.loads(json.dumps(found))


@pytest.mark.heavy
def test_teachers_alone_share_their_prompt_when_packed(record: dict[str, Any]) -> None:
    """Padded they are 16 rows of 148 tokens."""
    student, teachers, both = (record["stages"][name] for name in ("score student", "teachers", "score all"))
    longest = MICRO.prompt_tokens + HINT_TOKENS + MICRO.longest
    assert teachers["padded"]["tokens"] == 2 * ROWS * longest == 16 * 148
    assert both["padded"]["tokens"] == teachers["padded"]["tokens"] + student["padded"]["tokens"]
    # The prompt up to the hint is passed once, however many teachers read it: alone they pay for it again.
    shared = MICRO.prompt_tokens - 5 - 2
    alone = student["packed"]["tokens"] + teachers["packed"]["tokens"] - both["packed"]["tokens"]
    assert alone == pytest.approx(shared, abs=3)
    difference = record["stages"]["teachers (difference)"]["packed"]["seconds"]
    assert difference == pytest.approx(both["packed"]["seconds"] - student["packed"]["seconds"])


@pytest.mark.heavy
def test_the_profile_lists_12_operations_and_counts_products(record: dict[str, Any]) -> None:
    """The products are counted for each stage, as torch counts them."""
    assert list(record["profile"]) == ["score student", "teachers", "score all"] == list(record["matrix_products"])
    for name, operations in record["profile"].items():
        seconds = [operation["seconds"] for operation in operations]
        assert len(seconds) == LISTED_OPERATIONS
        assert seconds == sorted(seconds, reverse=True)
        assert 0.5 < sum(operation["share"] for operation in operations) <= 1
        products = record["matrix_products"][name]
        assert products["flops"] == record["stages"][name]["packed"]["matrix_product_flops"] - PATCH_FLOPS
        assert products["gflops_per_second"] == pytest.approx(products["flops"] / products["seconds"] / 1e9)
        large = products["large_product"]
        assert large["sizes"] == [record["stages"][name]["packed"]["tokens"], MICRO.hidden, MICRO.intermediate]
        assert large["gflops_per_second"] > 0
    tables = profile_tables(record)
    assert [text.partition(":")[0] for text in tables[:3]] == ["| score student", "| teachers", "| score all"]
    assert tables[3].count("128 x 384, float32") == 3


def test_teachers_of_the_students_context_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are left out of what is measured by itself."""
    assert told(monkeypatch, "--contexts", "1").stages == ["generate", "score student", "score all", "update"]
    assert "teachers" in told(monkeypatch).stages
    with pytest.raises(SystemExit):
        told(monkeypatch, "--contexts", "1", "--stages", "teachers")
    assert "give --contexts 2 or more" in capsys.readouterr().err
