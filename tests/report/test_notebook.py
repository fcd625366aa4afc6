"""What a notebook shows of a run: its result and its clearest pair of responses, as HTML without scripts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from run_folders import group, rollout, validated, write_run

from cepo.report.page import open_run


def test_a_notebook_shows_the_result_and_a_pair_of_responses(tmp_path: Path) -> None:
    """A right and a wrong response whose second token has 1.5 and whose others have 0.75 times uniform credit."""
    sides = [
        replace(rollout(right=right), token_advantages=[0.75 * sign, 1.5 * sign, 0.75 * sign])
        for right, sign in ((True, 0.5**0.5), (False, -(0.5**0.5)))
    ]
    run = open_run(write_run(tmp_path / "run", validated(0.36, 0.5), groups=[group(1, sides)]))
    html = run._repr_html_()
    assert "<p>cepo: run, step 1<br>50.0 ± 5.0 % accuracy at temperature 1, from 36.0 ± 4.8 %" in html
    assert "cepo credits “sides” of the right response most and blames “sides” of the wrong response most; grpo" in html
    assert html.count("✓ Right response") == html.count("✗ Wrong response") == 1
    assert "data:image/png;base64," in html
    assert "<script" not in html
    assert "href" not in html


def test_a_run_without_records_has_its_name_in_a_notebook(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "<b>", []))
    assert run._repr_html_() == "<p>cepo: &lt;b&gt;, step 0</p>\n"
