"""The report's page in headless Chromium: quiet, offline, quick, right to the digit, and deaf to hostile text."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright
from run_folders import PICTURE, group, rollout, write_run

from cepo.credit.agreement import QUARTERS
from cepo.credit.credit_page import credit_headline, write_credit_page
from cepo.evaluation.evaluation_page import write_evaluations
from cepo.evaluation.results import write_results
from cepo.evaluation.statistics import benchmark_figures
from cepo.look.look_page import write_look_page
from cepo.look.reading import read_rollouts_of
from cepo.report.compare import compare_runs, write_comparison
from cepo.report.credit_view import step_credit
from cepo.report.diagnosis import Observed, diagnosed
from cepo.report.page import write_report
from cepo.report.recorded_run import load_run
from cepo.report.responses import groups_of
from cepo.run_folder.layout import STAGES
from cepo.run_folder.pictures import thumbnail
from cepo.run_folder.trace import GroupRecord, RolloutRecord, read_rollouts

pytestmark = pytest.mark.heavy
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NAMES = (
    "reward/mean", "reward/std", "reward/correct", "response_length/mean", "response_length/min", "response_length/max",
    "evidence/positive_fraction", "evidence/negative_fraction", "evidence/lambda", "actor/grad_norm", "actor/pg_loss",
    "groups/mixed", "groups/all_right", "groups/all_wrong", "rollout/entropy", "timing_s/step",
    *(f"timing_s/{stage}" for stage in STAGES),
)  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed here: apt install chromium")
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Opened:
    """A page with what it said to the console and asked of the network."""

    def __init__(self, browser: Browser, path: Path, *, anchor: str = "", is_open: bool = True, **view: Any) -> None:
        self.page: Page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **view})
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda said: self.errors.extend([said.text] * (said.type in ("error", "warning"))))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        session = self.page.context.new_cdp_session(self.page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        self.page.goto(path.as_uri() + anchor)
        has_credit = self.page.locator("#credit").count() > 0
        if has_credit:
            self.page.wait_for_selector("#panels .tokens span", state="attached")
        measured = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
        self.busy_seconds = measured["TaskDuration"]
        if is_open and has_credit:
            self.page.evaluate("document.querySelector('#credit').open = true")

    def tip(self, panel: int, token: int) -> dict[str, str]:
        """What a token shows under the pointer."""
        self.page.mouse.move(0, 0)
        self.page.locator("#panels .tokens").nth(panel).locator("span").nth(token).hover()
        names, values = (self.page.locator(f"#tip {tag}").all_text_contents() for tag in ("dt", "dd"))
        return dict(zip(names, values, strict=True))

    def draw_all(self) -> int:
        """Reaches every chart, in parts that are folded too; returns their number."""
        self.page.evaluate("document.querySelectorAll('details').forEach((part) => part.open = true)")
        charts = self.page.locator(".opening figure, .charts figure")
        for number in range(charts.count()):
            charts.nth(number).scroll_into_view_if_needed()
            charts.nth(number).locator(".plot svg").wait_for()
        return charts.count()

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.text_content() or ""

    def is_quiet(self) -> bool:
        """Nothing was told to the console, and nothing asked but the page itself."""
        return (self.errors, self.requests) == ([], [self.page.url.partition("#")[0]])


def metric_rows(count: int) -> list[tuple[int, Mapping[str, float]]]:
    values = numpy.random.default_rng(count).uniform(-0.5, 1.5, (count, len(NAMES)))
    return [(step + 1, dict(zip(NAMES, map(float, row), strict=True))) for step, row in enumerate(values)]


def varied(count: int, seed: int, *, right: bool) -> RolloutRecord:
    """A rollout of as many tokens whose log-probs are all different."""
    student, correct, wrong = numpy.random.default_rng(seed).normal(-1.0, 0.7, (3, count)).astype("float32").tolist()
    plain = rollout(right=right, tokens=[f" w{place % 997}" for place in range(count)], delta=None)
    return replace(
        plain,
        log_probs={"student": student, "correct": correct, "wrong": wrong},
        references={"correct": "24", "wrong": "7"},
        weight=[1.0 + 0.25 * (place % 2) for place in range(count)],
        delta=[one - other for one, other in zip(correct, wrong, strict=True)],
    )


def mixed(step: int, tokens: int = 12, size: int = 2, **changes: Any) -> GroupRecord:
    return group(step, [varied(tokens, 10 * step + k, right=k % 2 == 0) for k in range(size)], **changes)


def folder_of(tmp_path: Path, steps: int, groups: Sequence[GroupRecord]) -> Path:
    return write_run(tmp_path / "run", metric_rows(steps), groups=groups)


@pytest.mark.parametrize("steps", [0, 1, 500])
def test_a_run_of_0_1_or_500_steps_opens_quietly(browser: Browser, tmp_path: Path, steps: int) -> None:
    """The first view takes at most 2 s of the page's thread; every chart is drawn when it is reached, light and dark."""
    groups = [mixed(step) for step in range(1, min(steps, 3) + 1)]
    page = write_report(folder_of(tmp_path, steps, groups))
    opened = [Opened(browser, page, color_scheme=scheme) for scheme in ("light", "dark")]
    assert 0 < max(each.busy_seconds for each in opened) < 2
    assert opened[1].draw_all() == (0 if steps == 0 else 12)
    assert all(each.is_quiet() for each in opened)


def test_keys_filters_and_links_lead_to_a_rollout(browser: Browser, tmp_path: Path) -> None:
    """Four rollouts, right and wrong in turn, at steps 1 and 2; the second step's prompt has another name and no image."""
    groups = [mixed(1, images=[PICTURE] * 3), mixed(2, prompt_id="other", images=[])]
    opened = Opened(browser, write_report(folder_of(tmp_path, 2, groups)), anchor="#step=1&rollout=1")
    page, position = opened.page, opened.page.locator("#position")
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


def test_hover_shows_the_numbers_of_trace_and_methods(browser: Browser, tmp_path: Path) -> None:
    """Each method's, at three tokens of a wrong rollout; the run's own are the recorded ones."""
    folder = folder_of(tmp_path, 1, [mixed(1, size=4)])
    opened = Opened(browser, write_report(folder), anchor="#step=1&rollout=3")
    for box in opened.page.locator("#methods input").all():
        box.check()
    step = step_credit(load_run(folder), list(read_rollouts(folder)))
    columns = step["rollouts"][3]["columns"]
    assert len(step["methods"]) >= 5
    assert opened.page.locator("#panels h3").all_text_contents() == step["methods"]
    clipped: list[str] = []
    for rates in step["rollouts"][3]["clip_rates"]:
        if rates is not None:
            ends = (
                f"{100 * rates['lower']:.1f} % of tokens at the lower bound, {100 * rates['upper']:.1f} % at the upper"
            )
            clipped.append(f"weight clipped: {ends}")
    assert opened.page.locator("#panels .clipped").all_text_contents() == clipped
    assert len(clipped) == 2, "of cepo and rlsd"
    (recorded,) = read_rollouts(folder)
    for number in range(len(step["methods"])):
        for token in (0, 5, 11):
            tip = opened.tip(number, token)
            expected = {f"log P {view}": values[token] for view, values in columns[0].items()}
            names = {
                "weight": "weight after clipping",
                "raw_weight": "weight before clipping",
                "clipping": "clipped at the upper bound (1) or the lower (-1)",
            }
            expected |= {names.get(name, name): values[token] for name, values in columns[number + 1].items()}
            if number == 0:
                expected["advantage"] = recorded.rollouts[3].token_advantages[token]
            if "delta" in tip:
                expected["cumulative evidence"] = sum(columns[number + 1]["delta"][: token + 1])
            assert tip.keys() == expected.keys()
            for name, value in expected.items():
                assert float(tip[name]) == pytest.approx(float(value), rel=6e-3, abs=1e-6), name
    assert opened.errors == []


def shades(opened: Opened) -> list[tuple[str, str]]:
    """The side and the share of full colour of each token of the first panel."""
    tokens = opened.page.locator("#panels .tokens").first.locator("span")
    read = "all => all.map((token) => [token.className, token.style.getPropertyValue('--share')])"
    return [(side.partition(" ")[0], share) for side, share in tokens.evaluate_all(read)]


def test_colours_are_white_at_neutral_and_say_credit_or_blame(browser: Browser, tmp_path: Path) -> None:
    """Advantages of 1, 0 and -0.5 in a run whose method is not registered here; full colour is at 2, in any step.

    Of weights of 1 and 1.25 in turn, in a right and in a wrong response, the legend says which side is which.
    """
    own = {"token_advantages": [1.0, 0.0, -0.5], "log_probs": {"student": [0.0] * 3}}
    plain = replace(rollout(right=True, delta=None), **own)
    config = "algorithm:\n  adv_estimator: my_method\n"
    folder = write_run(tmp_path / "own", metric_rows(1), config=config, groups=[group(1, [plain, plain])])
    assert shades(Opened(browser, write_report(folder))) == [("more", "50%"), ("less", "0%"), ("less", "25%")]
    page = write_report(folder_of(tmp_path, 1, [mixed(1, size=4)]))
    for number, side, ends in ((0, "more", "credited less.*credited more"), (1, "less", "blamed more.*blamed less")):
        opened = Opened(browser, page, anchor=f"#step=1&rollout={number}")
        assert shades(opened)[1] == (side, "50%")
        assert re.match(ends, opened.text("#panels .scale"))


def test_it_opens_on_evidence_and_says_if_a_link_is_bad(browser: Browser, tmp_path: Path) -> None:
    """Step 2 has the evidence; the last step has none. A bad address stays as it is, and no other rollout is shown."""
    none = group(3, [rollout(right=right, delta=None) for right in (True, False)])
    opened = Opened(browser, write_report(folder_of(tmp_path, 3, [mixed(2), none])))
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
    opened = Opened(browser, write_report(folder_of(tmp_path, 2, [mixed(1)])))
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
    rows = [(k, {"val/accuracy": p, "val/greedy_accuracy": g, **counts}) for k, p, g in ((0, 0.36, 0.0), (1, 0.5, 1.0))]
    opened = Opened(browser, write_report(write_run(tmp_path / "run", rows, groups=[mixed(1)])))
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
    clear = [
        replace(rollout(right=True, tokens=tokens), token_advantages=[1.25 * 0.5**0.5, 0.5**0.5, 0.75 * 0.5**0.5]),
        replace(
            rollout(right=False, tokens=tokens), token_advantages=[-0.75 * 0.5**0.5, -(0.5**0.5), -1.25 * 0.5**0.5]
        ),
    ]
    uniform = [rollout(right=right, tokens=tokens) for right in (True, False)]
    groups = [group(step, clear if step == 2 else uniform) for step in (1, 2, 3)]
    opened = Opened(browser, write_report(write_run(tmp_path / "run", metric_rows(3), groups=groups)))
    read = "all => all.map((token) => token.className + ' ' + token.style.getPropertyValue('--share'))"
    sides = opened.page.locator(".contrast .side")
    colours = [
        rows.locator("span").evaluate_all(read) for side in sides.all() for rows in side.locator(".tokens").all()
    ]
    assert colours == [
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
    rows = [(k, {"val/accuracy": 0.5, "val/num_samples": 8, "reward/correct": k / 2}) for k in (1, 2)]
    page_file = write_report(write_run(tmp_path / "run", rows, groups=[mixed(1), mixed(2)]))
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
    values = {"actor/pg_clipfrac_higher": 0.0, "tokens/generate": 200, "timing_s/step": 30.0}
    rows = [(k, values | {"actor/grad_norm": 0.5 * k, "actor/pg_loss": -k}) for k in (1, 2, 3)]
    opened = Opened(browser, write_report(write_run(tmp_path / "run", rows, groups=[mixed(1), mixed(2)])))
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
    for clock, last in (("tokens", "600"), ("minutes", "1.4")):
        page.locator("#clock").select_option(clock)
        assert words.all_text_contents()[-2:] == [last, clock]
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
    shown = page.locator("#panels .tokens").first.locator("span").all_text_contents()
    assert shown[:3] == ["<script>window.hacked = 1</script>", "⟨U+202E⟩abc", "⟨U+0007⟩"]
    assert shown[3] == "\\ud800"  # as the trace has it
    assert shown[4] == "a" * 100_000
    assert "onerror" in opened.text("#rollout")
    assert opened.is_quiet()


def test_8_rollouts_of_2000_tokens_take_5_mb_and_10_s(browser: Browser, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 1, [mixed(1, tokens=2000, size=8)])
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
    plain = [[rollout(right=right, delta=None, tokens=["a"] * 50) for right in (True, False)] for _ in range(5)]
    groups = [*(group(step, rollouts) for step, rollouts in enumerate(plain, 1)), mixed(6, tokens=50)]
    opened = Opened(browser, write_report(folder_of(tmp_path, 6, groups)))
    steps = opened.page.locator("#step option").all_text_contents()
    assert steps in (["all", "2", "4", "6"], ["all", "2", "6"], ["all", "6"])
    assert opened.text("#position").endswith(f"of {2 * (len(steps) - 1)}")
    expect(opened.page.locator("#rollout")).to_contain_text("6, rollout")


def test_charts_and_tables_have_the_numbers_of_the_metrics(browser: Browser, tmp_path: Path) -> None:
    rows = metric_rows(20)
    page = write_report(folder_of(tmp_path, 20, []))
    text = page.read_text(encoding="utf-8")
    items = re.findall(r'<script type="application/json">(.*?)</script>', text, flags=re.DOTALL)
    drawn = [numbers for item in items for numbers in _lists(json.loads(item))]
    for name in NAMES:
        values = [row[name] for _, row in rows]
        if name not in ("reward/std", "timing_s/step"):
            assert values in drawn, name
    opened = Opened(browser, page)
    opened.page.get_by_role("heading", name="All metrics").click()
    table = opened.page.locator("table", has=opened.page.get_by_role("button", name="lowest"))
    found = table.locator("tbody tr").evaluate_all(
        "all => all.map((row) => [...row.cells].map((cell) => cell.dataset.value ?? cell.textContent))"
    )
    for name, _, first, last, lowest, highest, mean, _ in found:
        values = [row[name] for _, row in rows]
        assert [float(first), float(last)] == [values[0], values[-1]]
        assert [float(lowest), float(highest)] == [min(values), max(values)]
        assert float(mean) == pytest.approx(numpy.mean(values))
    assert len(found) == len(NAMES)


def _lists(tree: Any) -> Iterator[list[float]]:
    if isinstance(tree, list) and tree and all(isinstance(value, int | float) for value in tree):
        yield tree
    elif isinstance(tree, list | dict):
        for below in tree.values() if isinstance(tree, dict) else tree:
            yield from _lists(below)


def test_the_page_of_a_comparison_opens_quietly(browser: Browser, tmp_path: Path) -> None:
    """Two methods with two seeds each; a run's name is text whatever it holds, and a heading sorts by exact values."""
    folders = []
    for number, (method, seed) in enumerate((m, k) for m in ("grpo", "cepo") for k in (0, 1)):
        config = f"algorithm:\n  adv_estimator: {method}\ntrainer:\n  seed: {seed}\n"
        rows = [(step, {**values, "val/accuracy": 0.5 - 0.1 * number}) for step, values in metric_rows(12)]
        folders.append(write_run(tmp_path / f"<img src=x onerror=alert(1)>{number}", rows, config=config))
    path = write_comparison(compare_runs(folders), tmp_path / "comparison.html")
    opened = Opened(browser, path, color_scheme="dark")
    assert opened.draw_all() == 24
    assert opened.is_quiet()
    assert opened.text(".headline").startswith("cepo is behind grpo by 20.0 points (95 % interval ")
    result, differing = opened.page.locator("table").all()
    assert "onerror=alert(1)>0" in (differing.text_content() or "")
    after = result.locator("thead th").all_text_contents().index("after") + 1
    column = result.locator(f"tbody tr td:nth-child({after})")
    assert [float(str(column.nth(row).get_attribute("data-value"))) for row in (0, 1)] == pytest.approx([45.0, 25.0])
    result.locator(f"thead th:nth-child({after}) button").click()
    assert column.first.text_content() == "25.00 ± 5.00"


def evaluation(folder: Path, right: Sequence[bool], image: str | None = None) -> Path:
    """The folder of an evaluation with one response per problem."""
    own = {"benchmark": "held_out", "kind": "numeric", "choices": [], "sample": 0, "answer": "7", "length": 3}
    rows = [
        {**own, "problem_id": str(k), "cluster": str(k), "problem": f"<image>problem {k}", "image": image}
        | {"ground_truth": "7", "response": f"response {k}", "correct": each, "finished": True, "scores": {}}
        for k, each in enumerate(right)
    ]
    folder.mkdir()
    (folder / "generations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sampling = {"num_samples": 1, "temperature": 1.0}
    description = {"checkpoint": None, "model": "tiny/model", "generator": "vllm", "sampling": sampling}
    write_results(folder, description, {"held_out": benchmark_figures(rows, has_variants=False)})
    return folder


def test_changed_verdicts_are_first_with_images_and_filters(browser: Browser, tmp_path: Path) -> None:
    """Of 120 problems 30, 31, ... 59 become right and 60 becomes wrong: 90 minus 60 right, +29 of 120 or 24.2 points."""
    image = thumbnail([Image.new("RGB", (640, 480), (10, 200, 30))])
    before = evaluation(tmp_path / "before", [k >= 60 for k in range(120)], image)
    after = evaluation(tmp_path / "after", [30 <= k != 60 for k in range(120)], image)
    opened = Opened(browser, write_evaluations([before, after], tmp_path / "evaluation.html"))
    page = opened.page
    assert opened.text("h1") == "Evaluation of before → after"
    assert opened.text(".results b").startswith("+24.2 ± ")
    assert page.get_by_role("button", name="benchmark").first.is_visible()
    part = page.locator(".table", has=page.get_by_role("button", name="verdict"))
    rows = part.locator("tbody tr")
    visible = part.locator("tbody tr:visible")
    verdicts = rows.locator("td:first-child").all_text_contents()
    assert verdicts == ["wrong → right"] * 30 + ["right → wrong"] + ["wrong"] * 30 + ["right"] * 59
    assert visible.count() == 50
    assert part.locator("output").text_content() == "50 of 120 rows"
    assert visible.first.locator("img").evaluate("(one) => [one.naturalWidth, one.naturalHeight]") == [96, 72]
    part.get_by_role("button", name="50 more").click()
    assert visible.count() == 100
    part.locator("select").select_option("right → wrong")
    assert visible.all_text_contents() == ["right → wrongproblem 60777response 60response 60"]
    part.locator("select").select_option("")
    part.locator("input").fill("problem 11")
    assert visible.count() == 11  # 11 and 110 to 119
    assert opened.is_quiet()


def test_one_evaluation_shows_its_wrong_responses_first(browser: Browser, tmp_path: Path) -> None:
    """An image that is no thumbnail of ours is not asked for."""
    folder = evaluation(tmp_path / "one", [True, False, True], "https://example.org/image.webp")
    opened = Opened(browser, write_evaluations([folder], folder / "evaluation.html"))
    assert opened.page.locator("tbody tr td:first-child").all_text_contents()[-3:] == ["wrong", "right", "right"]
    assert opened.text("h1") == "Evaluation of tiny/model"
    assert opened.page.locator("td.wrong").all_text_contents() == ["wrong"]
    assert "answer found" in opened.page.locator("thead").last.all_text_contents()[0]
    assert opened.page.locator("img").count() == 0
    assert opened.is_quiet()


CREDIT = {
    "description": {"checkpoint": None, "model": "tiny/model", "generator": "vllm"},
    "counts": dict.fromkeys(("problems", "responses", "tokens", "decisive_tokens", "prefixes", "continuations"), 4)
    | {"problems": 12, "tokens_sampled": 900, "share_right": 0.5},
    "ceiling": {"value": 0.9, "error": 0.05, "low": 0.8, "high": 1.0},
}


def credit_results(**pearson: float | None) -> dict[str, Any]:
    names = ("pearson", "pearson_corrected", "auroc", "share_on_decisive")

    def figure(value: float | None) -> dict[str, float | None]:
        return {"value": value, "error": 0.1, "low": value and value - 0.2, "high": value and value + 0.2}

    rows = [
        {"name": name, "kind": "control" if name == "oracle" else "method"}
        | {column: figure(value) for column in names}
        for name, value in pearson.items()
    ]
    known = {"name": "correct", **{name: figure(0.5) for name in ("nats", *QUARTERS, "limit", "wrong")}}
    return {**CREDIT, "knowledge": [known], "credit": rows, "value": rows}


def test_a_credit_of_two_problems_ranks_no_method() -> None:
    """Errors over two problems can be 0, as in "AUROC 1.000 ± 0.000"; from ten on the best method is named."""
    results = credit_results(uniform=0.1, cepo=0.4)
    few = results | {"counts": results["counts"] | {"problems": 2}}
    assert credit_headline(few).startswith("2 problems cannot rank methods: errors over so few say little.")
    enough = results | {"counts": results["counts"] | {"problems": 10}}
    assert credit_headline(enough).startswith("The credit of cepo correlates with the true credit by r = 0.40")


def trace(problem: str, *, is_right: bool, credit: Sequence[float | None]) -> dict[str, Any]:
    """A measured response of three tokens, of which a method gives the last four times the credit of the first."""
    sign = 1.0 if is_right else -1.0
    advantages = {"uniform": [sign] * 3, "grpo": [0.5 * sign] * 3, "cepo": [0.5 * sign, sign, 2 * sign]}
    return {
        "prompt_id": problem, "ground_truth": "27", "problem": "<image>How long?", "image": None, "row": 0,
        "response": "3 sides 27", "reward": float(is_right), "correct": is_right, "tokens": ["3", " sides", " 27"],
        "token_ids": [1, 2, 3], "values": [0.5] * 4, "credit": credit, "advantages": advantages, "evidence": {},
    }  # fmt: skip


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
    assert page.locator(".dots").first.locator("th").all_text_contents() == ["cepo", "uniform = grpo", "rlsd"]
    assert page.locator(".dots").first.locator(".number").all_text_contents() == [
        "0.40 ± 0.10",
        "0.10 ± 0.10",
        "-0.20 ± 0.10",
    ]
    assert page.locator(".dots .dot").first.get_attribute("style") == "--at:58.33%"
    assert page.locator("table.dots").first.get_attribute("style") == "--ceiling:100.0%;--zero:25.0%"
    boxes = (
        page.locator(".dots tr")
        .first.locator(".track div, .dot, .ceiling")
        .evaluate_all("all => all.map((one) => [one.getBoundingClientRect().left, one.getBoundingClientRect().width])")
    )
    (left, width), ceiling, dot = boxes
    assert (dot[0] + dot[1] / 2 - left) / width == pytest.approx(0.5833, abs=0.01)
    assert (ceiling[0] - left) / width == pytest.approx(1.0, abs=0.01)
    assert not page.locator(".table").first.is_visible(), "the tables are folded"
    cells = page.locator("table:not(.dots)").first.locator("tbody tr td:nth-child(2)")
    assert cells.all_text_contents()[-2:] == ["–", "0.800 ± 0.100"]
    assert opened.is_quiet()


def test_the_page_of_knowledge_alone_answers_with_its_limit(browser: Browser, tmp_path: Path) -> None:
    """Without continuations there is no truth: 0.5 nats of at most 0.5, as the helper's figures say."""
    results = {name: part for name, part in credit_results(uniform=0.1).items() if name in ("description", "knowledge")}
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
    (tmp_path / "traces.jsonl").write_text("".join(json.dumps(row) + "\n" for row in traces))
    results = credit_results(uniform=0.1, cepo=0.4, oracle=0.8)
    opened = Opened(browser, write_credit_page(results, tmp_path / "credit.html"))
    responses = opened.page.locator(".response")
    assert responses.locator("h3").all_text_contents() == [
        "✓ Right response, reward 1", "✗ Wrong response, reward 0", "✓ Right response, reward 1",
    ]  # fmt: skip
    wrong = responses.nth(1)
    assert wrong.locator(".method").all_text_contents() == ["true credit A*", "uniform = grpo", "cepo"]
    read = "all => all.map((token) => token.className + ' ' + token.style.getPropertyValue('--share'))"
    colours = [row.locator("span").evaluate_all(read) for row in wrong.locator(".tokens").all()]
    assert colours == [
        ["less 100%", "unmeasured 0%", "less 50%"],
        ["less 50%"] * 3,
        ["less 21%", "less 43%", "less 86%"],
    ]
    assert [responses.nth(number).is_visible() for number in range(3)] == [True, True, False]
    assert opened.is_quiet()


@pytest.fixture(scope="module")
def axe() -> str:
    """The source of axe-core, which a development dependency carries."""
    package = pytest.importorskip("axe_playwright_python", reason="axe-core is missing: pip install -e '.[dev]'")
    return (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")


OTHER_VIEW = pytest.mark.nightly("a quarter of a minute; dark and light, wide and narrow are in the other cases")


VIEWS = [(1400, "dark"), (360, "light")]
OTHER_VIEWS = [pytest.param(*view, marks=OTHER_VIEW) for view in ((1400, "light"), (800, "dark"))]


@pytest.mark.parametrize(("width", "scheme"), [*VIEWS, *OTHER_VIEWS])
def test_axe_has_no_serious_finding_on_any_page(
    browser: Browser, axe: str, tmp_path: Path, width: int, scheme: str
) -> None:
    """The pages of a run, a comparison, an evaluation and a measurement of credit, all parts open: none is too wide, all
    targets have 24 pixels, and the first key press leads to the skip link, which is outlined.
    """
    sample = {"prompt_id": "0", "problem": "p", "ground_truth": "1", "response": "1"}
    samples = {step: [{**sample, "accuracy": float(step)}] * 20 for step in (0, 1)}
    rows = [(k, {"val/accuracy": 0.4 + k / 10, "val/num_samples": 50, **values}) for k, values in metric_rows(3)]
    run = write_run(
        tmp_path / "run", rows, groups=[mixed(1, tokens=200, size=4, problem="x" * 500)], generations=samples
    )
    pages = [
        write_report(run),
        write_comparison(compare_runs([run]), tmp_path / "comparison.html"),
        write_evaluations([evaluation(tmp_path / "one", [True, False] * 10)], tmp_path / "evaluation.html"),
        write_credit_page(credit_results(uniform=0.1, cepo=0.4, oracle=0.8), tmp_path / "credit.html"),
    ]
    for page_file in pages:
        opened = Opened(browser, page_file, viewport={"width": width, "height": 900}, color_scheme=scheme)
        opened.draw_all()
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width, page_file.name
        small = opened.page.evaluate(
            "[...document.querySelectorAll('button, input, select, nav a, summary')].filter((one) => one.checkVisibility())"
            ".filter((one) => one.getBoundingClientRect().height < 24).map((one) => one.outerHTML.slice(0, 80))"
        )
        assert small == [], page_file.name
        opened.page.evaluate("scrollTo(0, 0)")
        opened.page.keyboard.press("Tab")
        shown = "[document.activeElement.className, getComputedStyle(document.activeElement).outlineStyle]"
        assert opened.page.evaluate(shown) == ["skip", "solid"]
        opened.page.evaluate(axe)
        found = opened.page.evaluate("axe.run().then((found) => found)")
        assert len(found["passes"]) > 10
        serious = [one for one in found["violations"] if one["impact"] in ("serious", "critical")]
        nodes = [(one["id"], node["html"][:150], node["failureSummary"]) for one in serious for node in one["nodes"]]
        assert nodes == [], page_file.name


@pytest.mark.parametrize("width", [1400, 390])
def test_the_page_of_rollouts_fits_and_is_searched(browser: Browser, tmp_path: Path, width: int) -> None:
    """Of 40 responses, 20 are right; a verdict and a word choose among them, and nothing is wider than the window."""
    lines = [
        {
            "prompt": f"Problem {number}?",
            "completion": f"It is {answer}.",
            "reward": float(answer == 5),
            "step": 1 + number // 5,
        }
        for number in range(10)
        for answer in (5, 7) * 2
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    seen = read_rollouts_of(file)
    observed = Observed(groups_of(seen.responses), seen.metrics)
    page = write_look_page(tmp_path / "look.html", seen, observed, diagnosed(observed))
    for scheme in ("light", "dark"):
        opened = Opened(browser, page, color_scheme=scheme, viewport={"width": width, "height": 900})
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
        assert opened.draw_all() == 4, "reward, accuracy, length and groups"
        table = opened.page.locator(".table", has=opened.page.locator("caption", has_text="40 of 40 responses"))
        table.locator("select").first.select_option("right")
        expect(table.locator("output")).to_have_text("20 of 20 rows")
        table.locator("input[type=search]").fill("Problem 3?")
        expect(table.locator("output")).to_have_text("2 of 2 rows")
        assert opened.is_quiet()
