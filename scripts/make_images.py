"""Draws the screenshots in docs/images. Needs Chromium, playwright and pillow.

    make_images.py [--quickstart RUN] [--real-model RUN]
    make_images.py --check

The pages are the quickstart's; the right and the wrong response of README are those of a run of scripts/real_model.sh.
With a run folder, what the screenshots show of it first replaces `docs/images/run` or `docs/images/real_model_run`.
`made_from.txt` has the digest of the code and the runs from which the images were drawn; a test compares it.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
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
QUICKSTART = IMAGES / "run"
REAL_MODEL = IMAGES / "real_model_run"
WIDTHS = {1400: 900, 800: 900, 360: 780}
SCHEMES = {"": "light", "_dark": "dark"}
CREDIT = {"credit": "#credit"}
CONTRAST = {"contrast": ".contrast"}
"""The parts of pages that have images of their own, by their selectors."""
_VERDICT = ("step", "prompt_id", "accuracy", "greedy_accuracy")
_ENVIRONMENT = ("started", "devices", "processor", "versions", "format")


def digest() -> str:
    """Returns the digest of everything that the images show: the page's templates, style and script, and the runs."""
    assets = list((REPOSITORY / "cepo" / "report" / "assets").iterdir())
    records = [path for run in (QUICKSTART, REAL_MODEL) for path in run.rglob("*") if path.is_file()]
    digest_of_files = hashlib.sha256()
    for file in sorted([*assets, *records]):
        digest_of_files.update(file.read_bytes())
    return digest_of_files.hexdigest()


def copy_run(source: Path, target: Path, name: str) -> None:
    """Replaces `target` with a run's metrics and settings, and the step whose responses open its page.

    `name` is that of the run's folder in its settings.
    """
    run = load_run(source)
    view = credit_view(run)
    if view is None:
        raise SystemExit(f"{source} has no recorded rollouts")
    step = view.contrast.step
    shutil.rmtree(target, ignore_errors=True)
    (target / "rollouts").mkdir(parents=True)
    (target / "images").mkdir()
    config = (source / "config.yaml").read_text(encoding="utf-8").replace(str(source), f"checkpoints/cepo/{name}")
    config = config.replace(f"{REPOSITORY}/", "").replace(str(Path.home()), "~")
    (target / "config.yaml").write_text(config, encoding="utf-8")
    for file in ("metrics.jsonl", f"rollouts/step_{step:08d}.parquet"):
        shutil.copy(source / file, target / file)
    _copy_verdicts(source, target, steps=(0, run.last_step))
    for group in read_rollouts(source):
        if group.step == step:
            for image in group.images:
                (target / "images" / f"{hashlib.sha256(image).hexdigest()[:32]}.png").write_bytes(image)
    descriptions: list[dict[str, Any]] = []
    for start in json.loads((source / "environment.json").read_text(encoding="utf-8")):
        descriptions.append({fact: start[fact] for fact in _ENVIRONMENT if fact in start})
    (target / "environment.json").write_text(json.dumps(descriptions, indent=2) + "\n", encoding="utf-8")


def _copy_verdicts(source: Path, target: Path, *, steps: Sequence[int]) -> None:
    """Copies the verdicts of two validations, without texts, for the paired errors."""
    with (target / "generations.jsonl").open("w", encoding="utf-8") as file:
        for row in read_generations(source):
            if row["step"] in steps:
                verdict = {name: row[name] for name in _VERDICT if name in row}
                file.write(json.dumps(verdict) + "\n")


def draw(page_file: Path, parts: Mapping[str, str], *, whole: bool) -> None:
    """Saves parts of a page, light and dark, and with `whole` its first screen at three widths."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for ending, scheme in SCHEMES.items():
            if whole:
                for width, height in WIDTHS.items():
                    page = _opened(browser, page_file, scheme, width, height)
                    _save(page.screenshot(), IMAGES / f"report_{width}{ending}.webp")
            page = _opened(browser, page_file, scheme, 1200, 800)
            for name, selector in parts.items():
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quickstart", type=Path, help="run folder of the pages")
    parser.add_argument("--real-model", type=Path, help="run folder of the two responses")
    parser.add_argument("--check", action="store_true", help="draw nothing; exit code 1: the images are out of date")
    options = parser.parse_args()
    made_from = IMAGES / "made_from.txt"
    if options.check:
        return 0 if made_from.read_text(encoding="utf-8").strip() == digest() else 1
    if options.quickstart is not None:
        copy_run(options.quickstart, QUICKSTART, "quickstart")
    if options.real_model is not None:
        copy_run(options.real_model, REAL_MODEL, "real_model-cepo")
    with tempfile.TemporaryDirectory() as folder:
        quickstart = shutil.copytree(QUICKSTART, Path(folder) / "quickstart")  # a page shows its folder's name
        draw(write_report(quickstart), CREDIT, whole=True)
        real_model = shutil.copytree(REAL_MODEL, Path(folder) / "real_model-cepo")
        draw(write_report(real_model), CONTRAST, whole=False)
    made_from.write_text(digest() + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
