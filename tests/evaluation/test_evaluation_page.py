"""The page of evaluations in headless Chromium."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser_pages import Opened
from page_contents import evaluation
from PIL import Image
from playwright.sync_api import Browser

from cepo.evaluation.evaluation_page import write_evaluations
from cepo.run_folder.pictures import thumbnail

pytestmark = pytest.mark.heavy


def test_changed_verdicts_are_first_with_images_and_filters(browser: Browser, tmp_path: Path) -> None:
    """Of 120 problems 30, 31, ... 59 become right and 60 becomes wrong: 90 minus 60 right, +29 of 120 or 24.2 points."""
    image = thumbnail([Image.new("RGB", (640, 480), (10, 200, 30))])
    right_before = [False] * 60 + [True] * 60
    right_after = [False] * 30 + [True] * 30 + [False] + [True] * 59
    first = evaluation(tmp_path / "before", right_before, image)
    second = evaluation(tmp_path / "after", right_after, image)
    opened = Opened(browser, write_evaluations([first, second], tmp_path / "evaluation.html"))
    page = opened.page
    assert opened.text("h1") == "Evaluation of before → after"
    assert opened.text(".results b").startswith("+24.2 ± ")
    assert page.get_by_role("button", name="benchmark").first.is_visible()
    part = page.locator(".table", has=page.get_by_role("button", name="verdict"))
    rows = part.locator("tbody tr")
    visible = part.locator("tbody tr:visible")
    verdicts = rows.locator("td:first-child").all_text_contents()
    assert verdicts == ["wrong → right"] * 30 + ["right → wrong"] + ["wrong"] * 30 + ["right"] * 59
    assert visible.count() == 50
    assert part.locator("output").text_content() == "50 of 120 rows"
    assert visible.first.locator("img").evaluate("(one) => [one.naturalWidth, one.naturalHeight]") == [96, 72]
    part.get_by_role("button", name="50 more").click()
    assert visible.count() == 100
    part.locator("select").select_option("right → wrong")
    assert visible.all_text_contents() == ["right → wrongproblem 60777response 60response 60"]
    part.locator("select").select_option("")
    part.locator("input").fill("problem 11")
    assert visible.count() == 11  # 11 and 110 to 119
    assert opened.is_quiet()


def test_one_evaluation_shows_its_wrong_responses_first(browser: Browser, tmp_path: Path) -> None:
    """An image that is no thumbnail of ours is not asked for."""
    folder = evaluation(tmp_path / "one", [True, False, True], "https://example.org/image.webp")
    opened = Opened(browser, write_evaluations([folder], folder / "evaluation.html"))
    page = opened.page
    assert opened.text("h1") == "Evaluation of tiny/model"
    first_cells = page.locator("tbody tr td:first-child").all_text_contents()
    assert first_cells[-3:] == ["wrong", "right", "right"]
    assert page.locator("td.wrong").all_text_contents() == ["wrong"]
    assert "answer found" in (page.locator("thead").last.text_content() or "")
    assert page.locator("img").count() == 0
    assert opened.is_quiet()
