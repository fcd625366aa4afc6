"""Markdown and LaTeX on the page of `cepo look`: they show as they read, and no text becomes markup."""

from __future__ import annotations

import shutil
from pathlib import Path

import json_files
import pytest
from case_files import cases
from playwright.sync_api import sync_playwright

from cepo.commands.cli import main

pytestmark = pytest.mark.heavy
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SHOWN: dict[str, str | None] = {case["written"]: case["shown"] for case in cases(__file__, "typeset_texts.yaml")}
SHOWN["$" + "{" * 90 + "$"] = None  # whatever it shows


def test_texts_show_as_they_read_until_asked_otherwise(tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed here: apt install chromium")
    rows: list[dict[str, object]] = []
    for number, text in enumerate(SHOWN, 1):
        of_problem = {"step": number, "prompt": f"Problem {number}?", "completion": text}
        rows += [of_problem | {"reward": 0}, of_problem | {"reward": 1}]
    file = json_files.write_lines(tmp_path / "rows.jsonl", rows)
    assert main(["look", str(file), "--out", str(tmp_path / "look.html")]) == 0
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        said: list[str] = []
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto((tmp_path / "look.html").as_uri())
        cells = page.locator("[data-typeset] tbody tr td:last-child > div")
        for number, (written, shown) in enumerate(SHOWN.items()):
            html = cells.nth(2 * number).inner_html()
            if shown is not None:
                assert html == shown.replace("<f>", '<span class="formula">').replace("</f>", "</span>"), written
        page.locator(".as-written").check()
        for number, written in enumerate(SHOWN):
            assert cells.nth(2 * number).text_content() == written
        browser.close()
    assert said == []
