"""Markdown and LaTeX on the page of `cepo look`: they show as they read, and no text becomes markup."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from cepo.commands.cli import main

pytestmark = pytest.mark.heavy
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SHOWN = {
    "**done** and `x_1`": "<b>done</b> and <code>x_1</code>",
    "### Step 1\nnext": "<b>Step 1</b>\nnext",
    "```python\na = **b\n```\nend": "<pre>a = **b</pre>\nend",
    "```\nnever closed": "<pre>never closed</pre>",
    "5*4=20. 4*4=16": "5*4=20. 4*4=16",
    "$5 or $6": "$5 or $6",
    "\\(x_1\\)": "<f>x<sub>1</sub></f>",
    "\\[ a \\le \\pi r^{2} \\]": "<f>a ≤ π r<sup>2</sup></f>",
    "$\\frac{1}{2}$": '<f><span class="frac"><span>1</span><span>2</span></span></f>',
    "so \\boxed{\\sqrt{2}}": 'so <f><span class="boxed"><span>√<span class="root">2</span></span></span></f>',
    "$\\unknown{3}$ \\alpha": "<f>\\unknown<span>3</span></f> \\alpha",
    "$" + "{" * 90 + "$": None,
    "<img src=x onerror=alert(1)> **<b>**": "&lt;img src=x onerror=alert(1)&gt; <b>&lt;b&gt;</b>",
}


def test_texts_show_as_they_read_until_asked_otherwise(tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed here: apt install chromium")
    rows = [
        {"step": number, "prompt": f"Problem {number}?", "completion": text, "reward": place}
        for number, text in enumerate(SHOWN, 1)
        for place in range(2)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
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
        assert [cells.nth(2 * number).text_content() for number in range(len(SHOWN))] == list(SHOWN)
        browser.close()
    assert said == []
