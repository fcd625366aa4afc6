"""Markdown and LaTeX on the page of `cepo look`: they show as they read, and no text becomes markup."""

from __future__ import annotations

from pathlib import Path

import json_files
import pytest
from browser_pages import Opened
from case_files import cases
from playwright.sync_api import Browser

from cepo.commands.cli import main

pytestmark = pytest.mark.heavy
SHOWN: dict[str, str | None] = {case["written"]: case["shown"] for case in cases(__file__, "typeset_texts.yaml")}
SHOWN["$" + "{" * 90 + "$"] = None  # whatever it shows


def test_texts_show_as_they_read_until_asked_otherwise(browser: Browser, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = []
    for number, text in enumerate(SHOWN, 1):
        of_problem = {"step": number, "prompt": f"Problem {number}?", "completion": text}
        rows += [of_problem | {"reward": 0}, of_problem | {"reward": 1}]
    file = json_files.write_lines(tmp_path / "rows.jsonl", rows)
    page_file = tmp_path / "look.html"
    assert main(["look", str(file), "--out", str(page_file)]) == 0

    opened = Opened(browser, page_file)
    cells = opened.page.locator("[data-typeset] tbody tr td:last-child > div")
    for number, (written, markup) in enumerate(SHOWN.items()):
        html = cells.nth(2 * number).inner_html()
        if markup is not None:
            assert html == markup.replace("<f>", '<span class="formula">').replace("</f>", "</span>"), written
    opened.page.locator(".as-written").check()
    for number, written in enumerate(SHOWN):
        assert cells.nth(2 * number).text_content() == written
    assert opened.is_quiet()
