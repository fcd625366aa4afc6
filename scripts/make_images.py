"""Draws docs/images from the recorded run in docs/images/run: `make_images.py [--check]`. It needs Chromium and playwright.

`made_from.txt` has the digest of the code and the run that the images were drawn from; a test compares it.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from pathlib import Path

from cepo.report import write_report

REPOSITORY = Path(__file__).resolve().parent.parent
IMAGES = REPOSITORY / "docs" / "images"
RUN = IMAGES / "run"
SHOTS = {
    "credit": ("#step=1&rollout=1", "light"),
    "credit_dark": ("#step=1&rollout=1", "dark"),
    "curves": ("", "light"),
}


def digest() -> str:
    """The digest of what the images show: the page's templates, scripts and charts, and the run."""
    files = [*(REPOSITORY / "cepo" / "report" / "assets").iterdir(), REPOSITORY / "cepo" / "report" / "charts.py"]
    found = hashlib.sha256()
    for file in sorted([*files, *(path for path in RUN.rglob("*") if path.is_file())]):
        found.update(file.read_bytes())
    return found.hexdigest()


def draw() -> None:
    """Writes the page of the run and photographs its parts."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        page_file = write_report(RUN, Path(folder) / "report.html")
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (anchor, scheme) in SHOTS.items():
            page = browser.new_page(viewport={"width": 1200, "height": 800}, color_scheme=scheme)
            page.goto(page_file.as_uri() + anchor)
            page.wait_for_selector("#panels .tokens span")
            part = page.locator("#credit" if anchor else "#section-1")
            part.scroll_into_view_if_needed()
            page.wait_for_timeout(1000)  # charts are drawn as they come into view
            part.screenshot(path=IMAGES / f"{name}.png")
        browser.close()


def main() -> int:
    """Draws the images, or with --check says whether they are up to date (exit code 1 if not)."""
    made_from = IMAGES / "made_from.txt"
    if "--check" in sys.argv[1:]:
        return 0 if made_from.read_text(encoding="utf-8").strip() == digest() else 1
    draw()
    made_from.write_text(digest() + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
