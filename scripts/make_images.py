"""Draws the images of the credit view in docs/images: `make_images.py [--check]`. Needs Chromium and playwright.

`docs/images/run` has the trace of `cepo show microgeo:model microgeo:validation --problems 2` with quickstart.yaml.
`made_from.txt` has the digest of the code and the run from which the images were drawn; a test compares it.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from pathlib import Path

from cepo.report.page import write_report

REPOSITORY = Path(__file__).resolve().parent.parent
IMAGES = REPOSITORY / "docs" / "images"
RUN = IMAGES / "run"
ROLLOUT = "#step=1&rollout=3"
SCHEMES = {"credit": "light", "credit_dark": "dark"}


def digest() -> str:
    """Returns the digest of everything that the images show: the page's templates, style and script, and the run."""
    files = list((REPOSITORY / "cepo" / "report" / "assets").iterdir())
    found = hashlib.sha256()
    for file in sorted([*files, *(path for path in RUN.rglob("*") if path.is_file())]):
        found.update(file.read_bytes())
    return found.hexdigest()


def draw() -> None:
    """Writes the page of the run and saves screenshots of its credit view."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        page_file = write_report(RUN, Path(folder) / "report.html")
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, scheme in SCHEMES.items():
            page = browser.new_page(viewport={"width": 1200, "height": 800}, color_scheme=scheme)
            page.goto(page_file.as_uri() + ROLLOUT)
            page.wait_for_selector("#panels .tokens span")
            page.locator("#credit").screenshot(path=IMAGES / f"{name}.png")
        browser.close()


def main() -> int:
    """Draws the images; with --check, returns 1 instead if they are out of date."""
    made_from = IMAGES / "made_from.txt"
    if "--check" in sys.argv[1:]:
        return 0 if made_from.read_text(encoding="utf-8").strip() == digest() else 1
    draw()
    made_from.write_text(digest() + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
