"""What axe-core finds on the pages of cepo, and whether they fit into a window."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from browser_pages import Opened
from page_contents import credit_results, evaluation, metric_rows, mixed_group
from playwright.sync_api import Browser
from run_folders import write_run

from cepo.credit.credit_page import write_credit_page
from cepo.evaluation.evaluation_page import write_evaluations
from cepo.report.compare import compare_runs, write_comparison
from cepo.report.page import write_report

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def axe() -> str:
    """The source of axe-core, which a development dependency carries."""
    package = pytest.importorskip("axe_playwright_python", reason="axe-core is missing: pip install -e '.[dev]'")
    return (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")


OTHER_VIEW = pytest.mark.nightly("a quarter of a minute; dark and light, wide and narrow are in the other cases")
SMALL_TARGETS = """
    [...document.querySelectorAll('button, input, select, nav a, summary')]
        .filter((element) => element.checkVisibility())
        .filter((element) => element.getBoundingClientRect().height < 24)
        .map((element) => element.outerHTML.slice(0, 80))
"""
FOCUSED = "[document.activeElement.className, getComputedStyle(document.activeElement).outlineStyle]"


def pages_of_each_kind(folder: Path) -> list[Path]:
    """The pages of a run, a comparison, an evaluation and a measurement of credit."""
    rows: list[tuple[int, Mapping[str, float]]] = []
    for step, values in metric_rows(3):
        rows.append((step, {"val/accuracy": 0.4 + step / 10, "val/num_samples": 50, **values}))
    sample = {"prompt_id": "0", "problem": "p", "ground_truth": "1", "response": "1"}
    samples = {0: [sample | {"accuracy": 0.0}] * 20, 1: [sample | {"accuracy": 1.0}] * 20}
    groups = [mixed_group(1, tokens=200, size=4, problem="x" * 500)]
    run = write_run(folder / "run", rows, groups=groups, generations=samples)
    evaluated = evaluation(folder / "one", [True, False] * 10)
    credit = credit_results(uniform=0.1, cepo=0.4, oracle=0.8)
    return [
        write_report(run),
        write_comparison(compare_runs([run]), folder / "comparison.html"),
        write_evaluations([evaluated], folder / "evaluation.html"),
        write_credit_page(credit, folder / "credit.html"),
    ]


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1400, "dark"),
        (360, "light"),
        pytest.param(1400, "light", marks=OTHER_VIEW),
        pytest.param(800, "dark", marks=OTHER_VIEW),
    ],
)
def test_axe_has_no_serious_finding_on_any_page(
    browser: Browser, axe: str, tmp_path: Path, width: int, scheme: str
) -> None:
    """All parts are open: none is too wide, all targets have 24 pixels, and the first key press leads to the skip link,
    which is outlined.
    """
    for page_file in pages_of_each_kind(tmp_path):
        opened = Opened(browser, page_file, viewport={"width": width, "height": 900}, color_scheme=scheme)
        page = opened.page
        opened.draw_all()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, page_file.name
        assert page.evaluate(SMALL_TARGETS) == [], page_file.name
        page.evaluate("scrollTo(0, 0)")
        page.keyboard.press("Tab")
        assert page.evaluate(FOCUSED) == ["skip", "solid"]

        page.evaluate(axe)
        findings = page.evaluate("axe.run().then((findings) => findings)")
        assert len(findings["passes"]) > 10
        faults: list[tuple[str, str, str]] = []
        for violation in findings["violations"]:
            if violation["impact"] in ("serious", "critical"):
                for node in violation["nodes"]:
                    faults.append((violation["id"], node["html"][:150], node["failureSummary"]))
        assert faults == [], page_file.name
