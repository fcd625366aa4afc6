"""The report's page in headless Chromium: quiet, offline, quick, right to the digit, and deaf to hostile text."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from browser_pages import Opened, colours_of
from page_contents import METRICS, metric_rows, mixed_group, run_with_metrics
from playwright.sync_api import Browser, expect
from run_folders import PICTURE, group, rollout, write_run

from cepo.report.compare import compare_runs, write_comparison
from cepo.report.credit_view import step_credit
from cepo.report.page import write_report
from cepo.report.recorded_run import load_run
from cepo.run_folder.trace import read_rollouts

pytestmark = pytest.mark.heavy


@pytest.mark.parametrize("steps", [0, 1, 500])
def test_a_run_of_0_1_or_500_steps_opens_quietly(browser: Browser, tmp_path: Path, steps: int) -> None:
    """The first view takes at most 2 s of the page's thread; every chart is drawn when it is reached, light and dark."""
    groups = [mixed_group(step) for step in range(1, min(steps, 3) + 1)]
    page = write_report(run_with_metrics(tmp_path / "run", steps, groups))
    for scheme in ("light", "dark"):
        opened = Opened(browser, page, color_scheme=scheme)
        assert 0 < opened.busy_seconds < 2
        assert opened.draw_all() == (0 if steps == 0 else 12)
        assert opened.is_quiet()


def test_keys_filters_and_links_lead_to_a_rollout(browser: Browser, tmp_path: Path) -> None:
    """Four rollouts, right and wrong in turn, at steps 1 and 2; the second step's prompt has another name and no image."""
    groups = [mixed_group(1, images=[PICTURE] * 3), mixed_group(2, prompt_id="other", images=[])]
    folder = run_with_metrics(tmp_path / "run", 2, groups)
    opened = Opened(browser, write_report(folder), anchor="#step=1&rollout=1")
    page = opened.page
    position = page.locator("#position")
    assert opened.text("#position") == "2 of 4"
    sizes = page.locator("#rollout img").evaluate_all("all => all.map((one) => one.naturalWidth)")
    assert sizes == [64] * 3
    page.keyboard.press("j")
    expect(page).to_have_url(re.compile("#step=2&rollout=0$"))
    assert page.locator("#rollout img").count() == 0
    page.keyboard.press("ArrowLeft")
    expect(page).to_have_url(re.compile("#step=1&rollout=1$"))
    page.locator("#verdict").select_option("right")
    expect(position).to_have_text("1 of 2")
    page.locator("#words").fill("OTHER")
    expect(position).to_have_text("1 of 1")
    assert "step=2" in page.url
    page.locator("#words").fill("no such words")
    expect(position).to_have_text("0 of 0")
    assert "No rollout" in opened.text("#rollout")
    page.evaluate("location.hash = '#step=1&rollout=0'")
    expect(position).to_have_text("1 of 4")
    page.locator("#panels .tokens").first.focus()
    for token in ("token 1: ' w0'", "token 2: ' w1'"):
        page.keyboard.press("ArrowRight")
        assert opened.text("#tip b") == token
    assert opened.errors == []


def opened_with_all_methods(browser: Browser, folder: Path) -> Opened:
    """The page at the fourth rollout of the first step, with the panels of all methods."""
    opened = Opened(browser, write_report(folder), anchor="#step=1&rollout=3")
    for box in opened.page.locator("#methods input").all():
        box.check()
    return opened


def test_hover_shows_the_numbers_of_trace_and_methods(browser: Browser, tmp_path: Path) -> None:
    """Each method's, at three tokens of a wrong rollout; the run's own are the recorded ones."""
    folder = run_with_metrics(tmp_path / "run", 1, [mixed_group(1, size=4)])
    opened = opened_with_all_methods(browser, folder)
    step = step_credit(load_run(folder), list(read_rollouts(folder)))
    log_probs, *columns_of_methods = step["rollouts"][3]["columns"]
    assert len(step["methods"]) >= 5
    assert opened.page.locator("#panels h3").all_text_contents() == step["methods"]
    (recorded,) = read_rollouts(folder)
    for number, columns in enumerate(columns_of_methods):
        for token in (0, 5, 11):
            tip = opened.tip(number, token)
            expected = {f"log P {view}": values[token] for view, values in log_probs.items()}
            for name, values in columns.items():
                expected[NAMES_IN_TIPS.get(name, name)] = values[token]
            if number == 0:
                expected["advantage"] = recorded.rollouts[3].token_advantages[token]
            if "delta" in tip:
                expected["cumulative evidence"] = sum(columns["delta"][: token + 1])
            assert tip.keys() == expected.keys()
            for name, value in expected.items():
                assert float(tip[name]) == pytest.approx(float(value), rel=6e-3, abs=1e-6), name
    assert opened.errors == []


NAMES_IN_TIPS = {
    "weight": "weight after clipping",
    "raw_weight": "weight before clipping",
    "clipping": "clipped at the upper bound (1) or the lower (-1)",
}


def test_clip_rates_stand_at_the_two_methods_that_clip(browser: Browser, tmp_path: Path) -> None:
    """They are cepo and rlsd."""
    folder = run_with_metrics(tmp_path / "run", 1, [mixed_group(1, size=4)])
    opened = opened_with_all_methods(browser, folder)
    step = step_credit(load_run(folder), list(read_rollouts(folder)))
    expected: list[str] = []
    for rates in step["rollouts"][3]["clip_rates"]:
        if rates is not None:
            lower = f"{100 * rates['lower']:.1f} % of tokens at the lower bound"
            upper = f"{100 * rates['upper']:.1f} % at the upper"
            expected.append(f"weight clipped: {lower}, {upper}")
    assert len(expected) == 2
    assert opened.page.locator("#panels .clipped").all_text_contents() == expected


def shades(opened: Opened) -> list[str]:
    """The side and the share of full colour of each token of the first panel."""
    colours = colours_of(opened.page.locator("#panels .tokens").first.locator("span"))
    return [re.sub(" .* ", " ", colour) for colour in colours]


def test_colours_are_white_at_neutral_and_say_credit_or_blame(browser: Browser, tmp_path: Path) -> None:
    """Of weights of 1 and 1.25 in turn, in a right and in a wrong response, the legend says which side is which."""
    page = write_report(run_with_metrics(tmp_path / "run", 1, [mixed_group(1, size=4)]))
    right = Opened(browser, page, anchor="#step=1&rollout=0")
    assert shades(right)[1] == "more 50%"
    assert re.match("credited less.*credited more", right.text("#panels .scale"))
    wrong = Opened(browser, page, anchor="#step=1&rollout=1")
    assert shades(wrong)[1] == "less 50%"
    assert re.match("blamed more.*blamed less", wrong.text("#panels .scale"))


def test_colours_of_an_unregistered_method_are_its_advantages(browser: Browser, tmp_path: Path) -> None:
    """Advantages of 1, 0 and -0.5; full colour is at 2, in any step."""
    recorded = replace(
        rollout(right=True, delta=None),
        token_advantages=[1.0, 0.0, -0.5],
        log_probs={"student": [0.0, 0.0, 0.0]},
    )
    config = "algorithm:\n  adv_estimator: my_method\n"
    groups = [group(1, [recorded, recorded])]
    folder = write_run(tmp_path / "run", metric_rows(1), config=config, groups=groups)
    opened = Opened(browser, write_report(folder))
    assert shades(opened) == ["more 50%", "less 0%", "less 25%"]


def test_it_opens_on_evidence_and_says_if_a_link_is_bad(browser: Browser, tmp_path: Path) -> None:
    """Step 2 has the evidence; the last step has none. A bad address stays as it is, and no other rollout is shown."""
    without_evidence = group(3, [rollout(right=True, delta=None), rollout(right=False, delta=None)])
    folder = run_with_metrics(tmp_path / "run", 3, [mixed_group(2), without_evidence])
    opened = Opened(browser, write_report(folder))
    expect(opened.page.locator("#rollout")).to_contain_text("2, rollout 1")
    assert "#" not in opened.page.url
    opened.page.evaluate("location.hash = '#step=7&rollout=99'")
    expect(opened.page.locator("#rollout")).to_contain_text("rollout 99 of step 7, which this page does not have")
    opened.page.locator("#colour").select_option("delta")
    assert opened.page.locator("#panels .tokens, #group .tokens").count() == 0
    assert opened.page.url.endswith("#step=7&rollout=99")
    opened.page.keyboard.press("j")
    expect(opened.page.locator("#position")).to_have_text("1 of 4")
    expect(opened.page).to_have_url(re.compile("#step=2&rollout=0$"))
    assert opened.errors == []


def test_the_theme_is_switched_and_the_address_copied(browser: Browser, tmp_path: Path) -> None:
    opened = Opened(browser, write_report(run_with_metrics(tmp_path / "run", 2, [mixed_group(1)])))
    page = opened.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    seen = []
    for theme in ("light", "dark", "auto"):
        page.get_by_label("Theme").select_option(theme)
        seen.append(page.evaluate("getComputedStyle(document.body).color"))
    assert seen == ["rgb(22, 25, 29)", "rgb(232, 234, 237)", "rgb(22, 25, 29)"]
    page.get_by_role("button", name="Copy link").click()
    expect(page.locator("#copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == f"{page.url}#step=1&rollout=1"
    page.get_by_role("button", name="Keys").click()
    assert page.locator("#keys").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#keys").is_visible()
    assert opened.errors == []


def test_the_first_screen_tells_the_result_with_errors(browser: Browser, tmp_path: Path) -> None:
    """Of 100 samples 36 and then 50 are right, greedy 0 of 8 and then 8: Wilson's errors have a width at both."""
    counts = {"val/num_samples": 100, "val/num_greedy_samples": 8}
    first_metrics = {"val/accuracy": 0.36, "val/greedy_accuracy": 0.0, **counts}
    last_metrics = {"val/accuracy": 0.5, "val/greedy_accuracy": 1.0, **counts}
    folder = write_run(tmp_path / "run", [(0, first_metrics), (1, last_metrics)], groups=[mixed_group(1)])
    opened = Opened(browser, write_report(folder))
    sampled, greedy = opened.page.locator(".results p").all_text_contents()
    assert sampled == (
        "50.0 ± 5.0 % accuracy at temperature 1 +14.0 ± 6.9 points from 36.0 ± 4.8 % at step 0; ± standard error"
    )
    assert greedy.startswith("100.0 ± 5.6 % greedy accuracy +100.0")  # half of 1 / (8 + 1)
    assert "from 0.0 ± 5.6 % at step 0" in greedy
    assert opened.page.locator(".opening .plot svg").count() == 1
    assert opened.text(".subtitle").startswith("cepo · ")


def test_the_first_screen_shows_a_right_and_a_wrong_response(browser: Browser, tmp_path: Path) -> None:
    """Shares of 1.25, 1 and 0.75 in a right, of 0.75, 1 and 1.25 in a wrong response: full, none, and full of the other.

    Under uniform credit no token has a colour. The step with the clearest pair is the second of three.
    """
    tokens = ("3", " sides", " 27")
    uniform_right = rollout(right=True, tokens=tokens)
    uniform_wrong = rollout(right=False, tokens=tokens)
    size = 0.5**0.5
    clear_right = replace(uniform_right, token_advantages=[1.25 * size, size, 0.75 * size])
    clear_wrong = replace(uniform_wrong, token_advantages=[-0.75 * size, -size, -1.25 * size])
    groups = [
        group(1, [uniform_right, uniform_wrong]),
        group(2, [clear_right, clear_wrong]),
        group(3, [uniform_right, uniform_wrong]),
    ]
    folder = run_with_metrics(tmp_path / "run", 3, groups)
    opened = Opened(browser, write_report(folder))
    sides = opened.page.locator(".contrast .side")
    responses = opened.page.locator(".contrast .side .tokens").all()
    assert [colours_of(response.locator("span")) for response in responses] == [
        ["more 100%", "more 0%", "less 100%"],
        ["more 0%"] * 3,
        ["more 100%", "more 0%", "less 100%"],
        ["more 0%"] * 3,
    ]
    assert sides.locator(".method").all_text_contents() == ["cepo", "grpo", "cepo", "grpo"]
    assert opened.text(".contrast h2") == (
        "cepo credits “3” of the right response most and blames “27” of the wrong response most; "
        "grpo treats every token of a response alike."
    )
    assert "from 0.75 to 1.25 times that, at step 2" in opened.text(".contrast .scale")
    sides.nth(1).locator("a").click()
    expect(opened.page).to_have_url(re.compile("#step=2&rollout=1$"))
    assert opened.is_quiet() or opened.errors == []


def test_credit_is_open_and_charts_and_links_lead_to_it(browser: Browser, tmp_path: Path) -> None:
    """The address names no rollout until the reader chooses one; a folded view is opened by what leads to it."""
    first = {"val/accuracy": 0.5, "val/num_samples": 8, "reward/correct": 0.5}
    second = first | {"reward/correct": 1.0}
    groups = [mixed_group(1), mixed_group(2)]
    page_file = write_report(write_run(tmp_path / "run", [(1, first), (2, second)], groups=groups))
    for click in (".contrast a[href^='#step']", "nav a[href='#credit']", "#credit > summary", ".charts svg"):
        opened = Opened(browser, page_file, is_open=False)
        page = opened.page
        expect(page.locator("#panels")).to_be_visible()
        assert page.url == page_file.as_uri()
        page.locator("#credit > summary").click()
        page.keyboard.press("j")
        assert not page.locator("#panels").is_visible()
        assert page.url == page_file.as_uri()
        page.locator(click).first.click()
        expect(page.locator("#panels")).to_be_visible()
        assert opened.errors == []


def test_a_chart_is_read_at_its_labels_and_leads_to_rollouts(browser: Browser, tmp_path: Path) -> None:
    constant = {"actor/pg_clipfrac_higher": 0.0, "tokens/generate": 200, "timing_s/step": 30.0}
    rows = [(step, constant | {"actor/grad_norm": 0.5 * step, "actor/pg_loss": -step}) for step in (1, 2, 3)]
    folder = write_run(tmp_path / "run", rows, groups=[mixed_group(1), mixed_group(2)])
    opened = Opened(browser, write_report(folder))
    page = opened.page
    assert opened.draw_all() == 4
    assert "Always 0, and not drawn: Ratio clip rate: beyond the higher limit." in opened.text("main")
    page.locator(".charts .plot svg").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    labels = page.locator(".charts .curve-label")
    assert labels.locator("output").all_text_contents()[:2] == ["-2", "1"]
    assert "actor/pg_loss" in (labels.first.get_attribute("title") or "")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("#step=2&rollout=0$"))
    words = page.locator(".charts .plot svg").first.locator("text.time, text.unit")
    page.locator("#clock").select_option("tokens")
    assert words.all_text_contents()[-2:] == ["600", "tokens"]
    page.locator("#clock").select_option("minutes")
    assert words.all_text_contents()[-2:] == ["1.4", "minutes"]
    page.locator("#smoothing").fill("0.5")
    page.locator("#log").check()
    page.locator("#find-chart").fill("gradient")
    assert page.locator(".charts figure:visible").count() == 1
    assert opened.errors == []


def test_text_of_models_and_data_stays_text(browser: Browser, tmp_path: Path) -> None:
    """Markup, control characters, marks that turn the text around, lone surrogates, and 100,000 characters."""
    hostile = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\x00\x1b\u202e\u2066"
    tokens = ["<script>window.hacked = 1</script>", "\u202eabc", "\x07", "\ud800", "a" * 100_000]
    rollouts = [replace(rollout(right=right, tokens=tokens), response=hostile) for right in (True, False)]
    samples = [{"prompt_id": hostile, "response": hostile + "b" * 100_000, "accuracy": 1.0}]
    groups = [group(1, rollouts, problem=hostile, ground_truth=hostile)]
    folder = write_run(tmp_path / "run", metric_rows(1), groups=groups, generations={1: samples})
    opened = Opened(browser, write_report(folder))
    page = opened.page
    assert page.evaluate("window.hacked") is None
    assert page.locator("#panels img, #panels script").count() == 0
    token_texts = page.locator("#panels .tokens").first.locator("span").all_text_contents()
    assert token_texts[:3] == ["<script>window.hacked = 1</script>", "⟨U+202E⟩abc", "⟨U+0007⟩"]
    assert token_texts[3] == "\\ud800"  # as the trace has it
    assert token_texts[4] == "a" * 100_000
    assert "onerror" in opened.text("#rollout")
    assert opened.is_quiet()


def test_8_rollouts_of_2000_tokens_take_5_mb_and_10_s(browser: Browser, tmp_path: Path) -> None:
    folder = run_with_metrics(tmp_path / "run", 1, [mixed_group(1, tokens=2000, size=8)])
    began = time.process_time()
    page = write_report(folder)
    assert time.process_time() - began < 10
    assert page.stat().st_size < 5_000_000
    opened = Opened(browser, page)
    assert opened.page.locator("#panels .tokens").count() >= 4
    assert opened.page.locator("#panels .tokens").first.locator("span").count() == 2000
    assert "delta" in opened.tip(0, 1999)


def test_a_page_of_too_many_rollouts_has_every_second_step(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six steps, of which the last has evidence: a limit below the size of four leaves steps 2 and 6, or 4 and so on."""
    monkeypatch.setattr("cepo.report.credit_view._MOST_BYTES", 12_000)
    right = rollout(right=True, delta=None, tokens=["a"] * 50)
    wrong = rollout(right=False, delta=None, tokens=["a"] * 50)
    groups = [group(step, [right, wrong]) for step in range(1, 6)]
    groups.append(mixed_group(6, tokens=50))
    opened = Opened(browser, write_report(run_with_metrics(tmp_path / "run", 6, groups)))
    steps = opened.page.locator("#step option").all_text_contents()
    assert steps in (["all", "2", "4", "6"], ["all", "2", "6"], ["all", "6"])
    assert opened.text("#position").endswith(f"of {2 * (len(steps) - 1)}")
    expect(opened.page.locator("#rollout")).to_contain_text("6, rollout")


def test_charts_and_tables_have_the_numbers_of_the_metrics(browser: Browser, tmp_path: Path) -> None:
    rows = metric_rows(20)
    page = write_report(run_with_metrics(tmp_path / "run", 20, []))
    text = page.read_text(encoding="utf-8")
    drawn: list[list[float]] = []
    for item in re.findall(r'<script type="application/json">(.*?)</script>', text, flags=re.DOTALL):
        drawn += lists_of_numbers(json.loads(item))
    values_of: dict[str, list[float]] = {}
    for name in METRICS:
        values_of[name] = [row[name] for _, row in rows]
        if name not in ("reward/std", "timing_s/step"):
            assert values_of[name] in drawn, name
    opened = Opened(browser, page)
    opened.page.get_by_role("heading", name="All metrics").click()
    table = opened.page.locator("table", has=opened.page.get_by_role("button", name="lowest"))
    rows_of_table = table.locator("tbody tr").evaluate_all(
        "all => all.map((row) => [...row.cells].map((cell) => cell.dataset.value ?? cell.textContent))"
    )
    for name, _, first, last, lowest, highest, mean, _ in rows_of_table:
        values = values_of[name]
        assert float(first) == values[0]
        assert float(last) == values[-1]
        assert float(lowest) == min(values)
        assert float(highest) == max(values)
        assert float(mean) == pytest.approx(numpy.mean(values))
    assert len(rows_of_table) == len(METRICS)


def lists_of_numbers(tree: Any) -> Iterator[list[float]]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if not isinstance(tree, list):
        return
    if tree and all(isinstance(value, int | float) for value in tree):
        yield tree
    for below in tree:
        yield from lists_of_numbers(below)


def test_the_page_of_a_comparison_opens_quietly(browser: Browser, tmp_path: Path) -> None:
    """Two methods with two seeds each; a run's name is text whatever it holds, and a heading sorts by exact values."""
    folders: list[Path] = []
    for number, (method, seed) in enumerate(itertools.product(["grpo", "cepo"], [0, 1])):
        config = f"algorithm:\n  adv_estimator: {method}\ntrainer:\n  seed: {seed}\n"
        rows = [(step, {**values, "val/accuracy": 0.5 - 0.1 * number}) for step, values in metric_rows(12)]
        folder = write_run(tmp_path / f"<img src=x onerror=alert(1)>{number}", rows, config=config)
        folders.append(folder)
    path = write_comparison(compare_runs(folders), tmp_path / "comparison.html")
    opened = Opened(browser, path, color_scheme="dark")
    assert opened.draw_all() == 24
    assert opened.is_quiet()
    assert opened.text(".headline").startswith("cepo is behind grpo by 20.0 points (95 % interval ")
    result, differing = opened.page.locator("table").all()
    assert "onerror=alert(1)>0" in (differing.text_content() or "")
    number_of_column = result.locator("thead th").all_text_contents().index("after") + 1
    column = result.locator(f"tbody tr td:nth-child({number_of_column})")
    values = [float(str(cell.get_attribute("data-value"))) for cell in column.all()]
    assert values == pytest.approx([45.0, 25.0])
    result.locator(f"thead th:nth-child({number_of_column}) button").click()
    assert column.first.text_content() == "25.00 ± 5.00"
