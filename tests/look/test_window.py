"""The page of `cepo look` in headless Chromium."""

from __future__ import annotations

from pathlib import Path

import json_files
import pytest
from browser_pages import Opened
from playwright.sync_api import Browser, expect

from cepo.look.look_page import write_look_page
from cepo.look.reading import read_rollouts_of
from cepo.report.diagnosis import Observed, diagnosed
from cepo.report.responses import groups_of

pytestmark = pytest.mark.heavy


@pytest.mark.parametrize("width", [1400, 390])
def test_the_page_of_rollouts_fits_and_is_searched(browser: Browser, tmp_path: Path, width: int) -> None:
    """Of 40 responses, 20 are right; a verdict and a word choose among them, and nothing is wider than the window."""
    rows: list[dict[str, object]] = []
    for number in range(10):
        for answer in (5, 7, 5, 7):
            row = {
                "prompt": f"Problem {number}?",
                "completion": f"It is {answer}.",
                "reward": float(answer == 5),
                "step": 1 + number // 5,
            }
            rows.append(row)
    file = json_files.write_lines(tmp_path / "rows.jsonl", rows)
    seen = read_rollouts_of(file)
    observed = Observed(groups_of(seen.responses), seen.metrics)
    page = write_look_page(tmp_path / "look.html", seen, observed, diagnosed(observed))
    for scheme in ("light", "dark"):
        opened = Opened(browser, page, color_scheme=scheme, viewport={"width": width, "height": 900})
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
        assert opened.draw_all() == 4, "reward, accuracy, length and groups"
        caption = opened.page.locator("caption", has_text="40 of 40 responses")
        table = opened.page.locator(".table", has=caption)
        table.locator("select").first.select_option("right")
        expect(table.locator("output")).to_have_text("20 of 20 rows")
        table.locator("input[type=search]").fill("Problem 3?")
        expect(table.locator("output")).to_have_text("2 of 2 rows")
        assert opened.is_quiet()
