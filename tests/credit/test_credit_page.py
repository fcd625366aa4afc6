"""The page of a measurement of credit in headless Chromium, and its headline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import json_files
import pytest
from browser_pages import Opened, colours_of
from page_contents import credit_results
from playwright.sync_api import Browser, Locator

from cepo.credit.credit_page import credit_headline, write_credit_page

pytestmark = pytest.mark.heavy


def test_a_credit_of_two_problems_ranks_no_method() -> None:
    """Errors over two problems can be 0, as in "AUROC 1.000 ± 0.000"; from ten on the best method is named."""
    results = credit_results(uniform=0.1, cepo=0.4)
    results["counts"]["problems"] = 2
    assert credit_headline(results).startswith("2 problems cannot rank methods: errors over so few say little.")
    results["counts"]["problems"] = 10
    assert credit_headline(results).startswith("The credit of cepo correlates with the true credit by r = 0.40")


def trace(problem: str, *, is_right: bool, credit: Sequence[float | None]) -> dict[str, Any]:
    """A measured response of three tokens, of which a method gives the last four times the credit of the first."""
    sign = 1.0 if is_right else -1.0
    advantages = {
        "uniform": [sign, sign, sign],
        "grpo": [0.5 * sign, 0.5 * sign, 0.5 * sign],
        "cepo": [0.5 * sign, sign, 2 * sign],
    }
    return {
        "prompt_id": problem,
        "problem": "<image>How long?",
        "image": None,
        "ground_truth": "27",
        "row": 0,
        "response": "3 sides 27",
        "tokens": ["3", " sides", " 27"],
        "token_ids": [1, 2, 3],
        "reward": float(is_right),
        "correct": is_right,
        "values": [0.5] * 4,
        "credit": credit,
        "advantages": advantages,
        "evidence": {},
    }


def test_the_credit_page_answers_first_and_sorts_its_dots(browser: Browser, tmp_path: Path) -> None:
    """On a scale from -0.3 to 0.9 in 1.2: 0 is at 25 %, 0.4 at 58.33 %, and the ceiling of 0.9 at 100 %.

    Equal rows share a dot, an undefined one and the control have none.
    """
    results = credit_results(uniform=0.1, cepo=0.4, rlsd=-0.2, grpo=0.1, gae=None, oracle=0.8)
    opened = Opened(browser, write_credit_page(results, tmp_path / "credit.html"))
    page = opened.page
    assert opened.text(".headline") == (
        "The credit of cepo correlates with the true credit by r = 0.40 ± 0.10, uniform credit by 0.10 ± 0.10; "
        "perfect credit would reach 0.90."
    )
    assert page.locator("h2").all_text_contents() == [
        "Agreement with the truth", "All figures of credit", "Value of a prefix", "What teachers know",
    ]  # fmt: skip
    plot = page.locator("table.dots").first
    assert plot.locator("th").all_text_contents() == ["cepo", "uniform = grpo", "rlsd"]
    assert plot.locator(".number").all_text_contents() == ["0.40 ± 0.10", "0.10 ± 0.10", "-0.20 ± 0.10"]
    assert plot.locator(".dot").first.get_attribute("style") == "--at:58.33%"
    assert plot.get_attribute("style") == "--ceiling:100.0%;--zero:25.0%"
    line, ceiling, dot = plot.locator("tr").first.locator(".track div, .dot, .ceiling").all()
    line_left, line_width = edge_and_width(line)
    dot_left, dot_width = edge_and_width(dot)
    ceiling_left, _ = edge_and_width(ceiling)
    assert (dot_left + dot_width / 2 - line_left) / line_width == pytest.approx(0.5833, abs=0.01)
    assert (ceiling_left - line_left) / line_width == pytest.approx(1.0, abs=0.01)
    assert not page.locator(".table").first.is_visible(), "the tables are folded"
    cells = page.locator("table:not(.dots)").first.locator("tbody tr td:nth-child(2)")
    assert cells.all_text_contents()[-2:] == ["–", "0.800 ± 0.100"]
    assert opened.is_quiet()


def edge_and_width(element: Locator) -> tuple[float, float]:
    left_edge, width = element.evaluate(
        "(one) => [one.getBoundingClientRect().left, one.getBoundingClientRect().width]"
    )
    return left_edge, width


def test_the_page_of_knowledge_alone_answers_with_its_limit(browser: Browser, tmp_path: Path) -> None:
    """Without continuations there is no truth: 0.5 nats of at most 0.5, as the helper's figures say."""
    measured = credit_results(uniform=0.1)
    results = {"description": measured["description"], "knowledge": measured["knowledge"]}
    opened = Opened(browser, write_credit_page(results, tmp_path / "credit.html"))
    assert opened.text("h1") == "What teachers know"
    assert opened.text(".headline") == (
        "The teacher correct raises the log-probability of right responses by 0.50 ± 0.10 nats; "
        "no teacher can exceed 0.50 on average."
    )
    assert opened.page.locator(".dots .number").all_text_contents() == ["0.50 ± 0.10"]
    assert opened.page.locator(".dots").is_visible()
    assert opened.is_quiet()


def test_true_credit_stands_above_each_methods_tokens(browser: Browser, tmp_path: Path) -> None:
    """The pair is of the problem with the largest |A*|, 0.8: its 0.8 and 0.4 have full and half colour.

    Uniform credit has half of the full colour, and cepo's mean of 7/6 makes shares of 0.5 / (14/6) = 21 %, 43 % and 86 %.
    """
    traces = [
        trace("b", is_right=True, credit=[0.1, 0.0, 0.2]),
        trace("a", is_right=False, credit=[-0.8, None, -0.4]),
        trace("a", is_right=True, credit=[0.5, 0.0, 0.1]),
    ]
    json_files.write_lines(tmp_path / "traces.jsonl", traces)
    results = credit_results(uniform=0.1, cepo=0.4, oracle=0.8)
    opened = Opened(browser, write_credit_page(results, tmp_path / "credit.html"))
    responses = opened.page.locator(".response")
    assert responses.locator("h3").all_text_contents() == [
        "✓ Right response, reward 1", "✗ Wrong response, reward 0", "✓ Right response, reward 1",
    ]  # fmt: skip
    wrong = responses.nth(1)
    assert wrong.locator(".method").all_text_contents() == ["true credit A*", "uniform = grpo", "cepo"]
    true_credit, uniform, cepo = wrong.locator(".tokens").all()
    assert colours_of(true_credit.locator("span")) == ["less 100%", "unmeasured 0%", "less 50%"]
    assert colours_of(uniform.locator("span")) == ["less 50%", "less 50%", "less 50%"]
    assert colours_of(cepo.locator("span")) == ["less 21%", "less 43%", "less 86%"]
    assert [response.is_visible() for response in responses.all()] == [True, True, False]
    assert opened.is_quiet()
