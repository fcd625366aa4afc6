"""Draws the screenshots in docs/images: `make_images.py [RUN | --check]`. Needs Chromium, playwright and pillow.

With a run folder, such as the quickstart's, `docs/images/run` is first replaced with what the screenshots show of it.
`made_from.txt` has the digest of the code and the run from which the images were drawn; a test compares it.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from cepo.report.credit_view import credit_view
from cepo.report.page import write_report
from cepo.report.recorded_run import load_run
from cepo.run_folder.records import read_generations
from cepo.run_folder.trace import read_rollouts

REPOSITORY = Path(__file__).resolve().parent.parent
IMAGES = REPOSITORY / "docs" / "images"
RUN = IMAGES / "run"
WIDTHS = {1400: 900, 800: 900, 360: 780}
SCHEMES = {"": "light", "_dark": "dark"}
PARTS = {"contrast": ".contrast", "credit": "#credit"}
_ENVIRONMENT = ("started", "devices", "processor", "versions", "format")


def digest() -> str:
    """Returns the digest of everything that the images show: the page's templates, style and script, and the run."""
    assets = list((REPOSITORY / "cepo" / "report" / "assets").iterdir())
    records = [path for path in RUN.rglob("*") if path.is_file()]
    digest_of_files = hashlib.sha256()
    for file in sorted([*assets, *records]):
        digest_of_files.update(file.read_bytes())
    return digest_of_files.hexdigest()


def copy_run(source: Path) -> None:
    """Replaces the run of the images with a run's metrics and settings, and the step whose responses open its page."""
    run = load_run(source)
    view = credit_view(run)
    if view is None:
        raise SystemExit(f"{source} has no recorded rollouts")
    step = view.contrast.step
    shutil.rmtree(RUN, ignore_errors=True)
    (RUN / "rollouts").mkdir(parents=True)
    (RUN / "images").mkdir()
    config = (source / "config.yaml").read_text(encoding="utf-8").replace(str(source), "checkpoints/cepo/quickstart")
    config = config.replace(f"{REPOSITORY}/", "").replace(str(Path.home()), "~")
    (RUN / "config.yaml").write_text(config, encoding="utf-8")
    for name in ("metrics.jsonl", f"rollouts/step_{step:08d}.parquet"):
        shutil.copy(source / name, RUN / name)
    _copy_verdicts(source, steps=(0, run.last_step))
    for group in read_rollouts(source):
        if group.step == step:
            for image in group.images:
                (RUN / "images" / f"{hashlib.sha256(image).hexdigest()[:32]}.png").write_bytes(image)
    descriptions: list[dict[str, Any]] = []
    for start in json.loads((source / "environment.json").read_text(encoding="utf-8")):
        descriptions.append({name: start[name] for name in _ENVIRONMENT if name in start})
    (RUN / "environment.json").write_text(json.dumps(descriptions, indent=2) + "\n", encoding="utf-8")


def _copy_verdicts(source: Path, *, steps: Sequence[int]) -> None:
    """Copies the verdicts of two validations, without texts, for the paired errors."""
    with (RUN / "generations.jsonl").open("w", encoding="utf-8") as file:
        for row in read_generations(source):
            if row["step"] in steps:
                verdict = {name: row[name] for name in ("step", "prompt_id", "accuracy", "greedy_accuracy")}
                file.write(json.dumps(verdict) + "\n")


def draw(page_file: Path) -> None:
    """Saves a page's first screen at three widths, its two responses side by side and its credit view, light and dark."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for ending, scheme in SCHEMES.items():
            for width, height in WIDTHS.items():
                page = _opened(browser, page_file, scheme, width, height)
                _save(page.screenshot(), IMAGES / f"report_{width}{ending}.webp")
            page = _opened(browser, page_file, scheme, 1200, 800)
            for name, selector in PARTS.items():
                _save(page.locator(selector).screenshot(), IMAGES / f"{name}{ending}.webp")
        browser.close()


def _opened(browser: Any, page_file: Path, scheme: str, width: int, height: int) -> Any:
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.goto(page_file.as_uri())
    page.wait_for_selector("#panels .tokens span", state="attached")
    page.wait_for_timeout(500)  # for charts
    return page


def _save(png: bytes, path: Path) -> None:
    """Saves a screenshot with 128 colours, which a page of text and curves needs no more of."""
    reduced = Image.open(io.BytesIO(png)).convert("RGB").quantize(128).convert("RGB")
    reduced.save(path, lossless=True, method=6)


def main() -> int:
    """Draws the images; with --check, returns 1 instead if they are out of date."""
    made_from = IMAGES / "made_from.txt"
    arguments = sys.argv[1:]
    if "--check" in arguments:
        return 0 if made_from.read_text(encoding="utf-8").strip() == digest() else 1
    if arguments:
        copy_run(Path(arguments[0]))
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(RUN, Path(folder) / "quickstart")
        draw(write_report(Path(folder) / "quickstart"))
    made_from.write_text(digest() + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
