"""The page of `cepo look`: what it shows, that no text of a response becomes markup, and the contrast of a model."""

from __future__ import annotations

import base64
import io
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from image_files import encoded
from json_files import write_lines
from PIL import ExifTags, Image

from cepo.commands.cli import main
from cepo.errors import DataError
from cepo.look.contrast import chosen_groups, contrast_noise, contrast_sections, gauge, scored_groups
from cepo.look.look_page import write_look_page
from cepo.look.reading import read_rollouts_of, trl_metrics
from cepo.look.text_pair import clearest_pair_section
from cepo.microgeo.world import ASSETS
from cepo.report.charts import LENGTH, charts_of
from cepo.report.credit_view import beliefs_of
from cepo.report.diagnosis import Observed, diagnosed
from cepo.report.responses import RecordedResponse, groups_of
from cepo.types import TokenBatch

HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>'
CASES = [("5 sides. 5*4=20. \\boxed{20}", 1.0), ("4 sides. 4*4=16. \\boxed{16}", 0.0)]


class Tags(HTMLParser):
    """Counts the elements of a page, and collects its texts outside scripts and styles."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.texts: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href") or name.startswith("on")]

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] not in (["script"], ["style"]):
            self.texts.append(data)


def rollouts_file(folder: Path, *, groups: int = 10, response: str = "") -> Path:
    """Groups of two right and two wrong responses, four groups a step."""
    rows: list[dict[str, object]] = []
    for number in range(groups):
        of_problem = {"step": 1 + number // 4, "prompt": f"Problem {number}?"}
        for text, reward in CASES * 2:
            rows.append(of_problem | {"completion": text + response, "reward": reward})
    return write_lines(folder / "rows.jsonl", rows)


def page_of(file: Path) -> Path:
    """The page of the rollouts in a file, beside it."""
    seen = read_rollouts_of(file)
    observed = Observed(groups_of(seen.responses), seen.metrics)
    return write_look_page(file.with_name("look.html"), seen, observed, diagnosed(observed))


def test_the_command_prints_the_diagnosis_and_writes_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "look.html"
    assert main(["look", str(rollouts_file(tmp_path)), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "JSON lines: 40 rollouts in 1 files; not recorded: right answers" in printed
    assert f"page: {out}" in printed
    page = Tags(out)
    text = " ".join(page.texts)
    for heading in ("What keeps it from learning", "The clearest pair", "Learning", "Responses", "Groups"):
        assert heading in text
    assert "40 of 40 responses" in text
    assert "∅" not in text
    assert all(address.startswith(("#", "data:")) for address in page.addresses), "nothing is loaded"


def test_no_text_of_a_response_becomes_markup(tmp_path: Path) -> None:
    """As many elements as with a harmless text of the same length, and no attribute of theirs that runs."""
    harmless_file = rollouts_file(tmp_path / "harmless", response="x" * len(HOSTILE))
    hostile_file = rollouts_file(tmp_path / "hostile", response=HOSTILE)
    harmless = Tags(page_of(harmless_file))
    hostile = Tags(page_of(hostile_file))
    for tag in ("script", "img"):
        assert hostile.tags.count(tag) == harmless.tags.count(tag)
    assert HOSTILE in "".join(hostile.texts)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "TIFF"])
def test_images_of_the_formats_of_data_sets_are_shown_upright(tmp_path: Path, kind: str) -> None:
    """700 x 350 pixels that lie on their side become 320 x 640."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    options = {} if kind == "GIF" else {"exif": exif.tobytes()}
    (tmp_path / "figure").write_bytes(encoded(Image.new("RGB", (700, 350), "red"), kind, **options))
    rows = [{"prompt": "One?", "completion": text, "reward": 1.0, "images": ["figure"]} for text in "12"]
    page = page_of(write_lines(tmp_path / "rows.jsonl", rows)).read_text(encoding="utf-8")
    (content,) = set(re.findall(r"data:image/webp;base64,([A-Za-z0-9+/=]+)", page))
    shown = Image.open(io.BytesIO(base64.b64decode(content)))
    assert shown.size == ((640, 320) if kind == "GIF" else (320, 640))


def test_single_responses_are_no_dead_groups(tmp_path: Path) -> None:
    """Validations have one response a problem; a group of one has nothing to compare."""
    rows = [{"prompt": f"Problem {number}?", "completion": "5", "reward": number % 2} for number in range(6)]
    page = page_of(write_lines(tmp_path / "rows.jsonl", rows))
    assert "of the groups are dead" not in page.read_text(encoding="utf-8")


def test_a_page_of_many_responses_stays_small(tmp_path: Path) -> None:
    """Of 20,000 responses of 300 characters, those of evenly spread groups are in a page of less than 8 MB."""
    page = page_of(rollouts_file(tmp_path, groups=5_000, response=" and so on" * 27))
    assert page.stat().st_size < 8_000_000
    assert "of 20,000 responses, of groups evenly spread over the run" in page.read_text(encoding="utf-8")


def test_the_still_picture_is_one_file_without_markup_of_texts(tmp_path: Path) -> None:
    """A response of 100 lines has 16 in it, among them its only coloured word; there is no element but the drawing's."""
    picture = tmp_path / "pair.svg"
    file = rollouts_file(tmp_path, response=f"\n{HOSTILE}" + "\nand so on" * 98)
    assert main(["look", str(file), "--out", str(tmp_path / "look.html"), "--image", str(picture)]) == 0
    elements = list(ElementTree.parse(picture).getroot().iter())
    kinds = {element.tag.partition("}")[2] for element in elements}
    assert kinds == {"svg", "style", "rect", "text"}
    tokens = [element for element in elements if element.get("class") == "token"]
    lines = {token.get("y") for token in tokens}
    assert len(lines) == 16
    assert "20" in [(token.text or "").strip() for token in tokens]
    assert "prefers-color-scheme: dark" in picture.read_text(encoding="utf-8")


def test_a_pair_differs_in_its_texts() -> None:
    """A judge rewards one of two equal texts: they begin alike for longest, and show nothing."""
    texts = [("It is 1.", 1.0), ("It is 1.", 0.0), ("It is 2.", 0.0)]
    rows = [
        RecordedResponse(step=1, group="0", prompt="", response=text, reward=reward, right=reward > 0, length=8)
        for text, reward in texts
    ]
    pair = clearest_pair_section(groups_of(rows))
    assert pair is not None
    assert [token.text.strip() for side in pair.responses for token in side.rows[0].tokens if token.percent] == [
        "1",
        "2",
    ]
    assert clearest_pair_section(groups_of(rows[:2])) is None


def test_a_pair_with_an_empty_response_is_drawn(tmp_path: Path) -> None:
    """A policy that ends at once has empty responses, which have no word to colour."""
    rows = [{"prompt": "One?", "completion": "1" * (number % 2), "reward": number % 2} for number in range(4)]
    file = write_lines(tmp_path / "rows.jsonl", rows)
    picture = tmp_path / "pair.svg"
    assert main(["look", str(file), "--out", str(tmp_path / "look.html"), "--image", str(picture)]) == 0
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_a_still_picture_is_svg(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["look", str(rollouts_file(tmp_path)), "--image", "pair.png"]) == 2
    assert capsys.readouterr().err == "cepo look: --image pair.png: the ending must be .svg\n"


def test_without_torch_model_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra `look` is without torch, which `--model` alone needs."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "cepo.look.contrast")
    assert main(["look", str(rollouts_file(tmp_path)), "--model", str(ASSETS)]) == 2
    assert capsys.readouterr().err == "cepo look needs torch: pip install -e '.[cpu]' or '.[gpu]', in cepo's checkout\n"


def test_an_adapter_is_to_be_merged_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TRL saves the adapter alone, and the base that it names needs the user's word."""
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    out = str(tmp_path / "look.html")
    assert main(["look", str(rollouts_file(tmp_path)), "--model", str(tmp_path), "--out", out]) == 2
    assert f"merge it first: cepo merge {tmp_path} --base MODEL --out FOLDER" in capsys.readouterr().err


def test_what_cannot_be_read_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["look", str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err == f"cepo look: {tmp_path / 'nothing'} does not exist.\n"


def test_the_word_that_decides_has_the_contrast(tmp_path: Path) -> None:
    """Teachers that read 20 and 16: the count of sides is credited in the right response, and blamed in the wrong one."""
    rows: list[RecordedResponse] = []
    for number in range(2):
        for text, reward in CASES * 2:
            row = RecordedResponse(
                step=40,
                group=str(number),
                prompt="Each side is 4. What is the perimeter? Answer in \\boxed{}.",
                response=text,
                reward=reward,
                right=reward == 1.0,
                length=20,
            )
            rows.append(row)
    scored = scored_groups(groups_of(rows), str(ASSETS), responses=8)
    assert [len(record.rollouts) for record in scored.groups] == [4, 4]
    for record in scored.groups:
        assert record.step == 40, "not that of the methods' schedules, whose weights would be 0"
        right, wrong, *_ = record.rollouts
        assert right.references == {"correct": "20", "wrong": "16"}
        assert right.tokens[0] == "5"
        assert right.delta is not None
        assert wrong.delta is not None
        assert right.delta[0] > 1.0 > 0.0 > wrong.delta[0]
        assert max(right.delta[1:4], key=abs) < 0.5 * right.delta[0]
    for record in scored.groups:
        believed = beliefs_of(record)
        assert [believed[0][0], believed[1][0]] == pytest.approx([0.375, 0.625]), "(1 + 1/2) / 4 and (2 + 1/2) / 4"
        assert believed[0][1] > 0.5, "after the count of sides"
        assert believed[1][-1] < believed[1][0]
    clearest, further_groups = contrast_sections(scored)
    assert "“5”" in clearest.notes[0]
    assert len(further_groups.responses) == 8
    assert "nats of a right response" in gauge(scored)


def test_noise_is_what_contradicts_the_outcome() -> None:
    """Of six tokens, ten times, one had no alternative. Of the others -0.2 and -0.1 speak against: noise 0.1 / 0.6745.

    Above twice that are 0.9 of the right response, and 0.4 of the wrong one, whose contrast is -0.4: two of five.
    """
    probability = torch.tensor([[0.5, 0.5, 0.99], [0.5, 0.5, 0.5]])
    delta = torch.tensor([[0.9, -0.2, -3.0], [-0.4, 0.1, 0.0]])
    delta = delta.repeat(1, 10)
    probability = probability.repeat(1, 10)
    batch = TokenBatch(
        token_level_rewards=torch.zeros(2, 30),
        response_mask=torch.ones(2, 30, dtype=torch.bool),
        old_log_probs=probability.log(),
        group_ids=torch.zeros(2, dtype=torch.long),
        teacher_log_probs={"correct": probability.log(), "wrong": probability.log()},
        correct=torch.tensor([True, False]),
        has_reference={"correct": torch.tensor([True, True]), "wrong": torch.tensor([True, True])},
    )
    noise = contrast_noise(batch, delta)
    assert noise is not None
    assert noise.nats == pytest.approx(0.1 / 0.6745)
    assert noise.for_outcome == 0.4
    assert noise.against_outcome == 0.0
    assert contrast_noise(batch, 0 * delta) is None, "no token contradicts the outcome"


def test_without_a_mixed_group_there_is_nothing_to_contrast() -> None:
    rows = [RecordedResponse(step=1, group="0", prompt="", response="", reward=1.0, right=True, length=0)] * 4
    with pytest.raises(DataError, match="nothing to contrast"):
        chosen_groups(groups_of(rows), responses=8)


def test_the_band_of_lengths_is_in_the_unit_of_their_mean() -> None:
    """TRL's files have texts, of 20 and 22 characters, and its checkpoint the lengths in tokens: the band once mixed both."""
    rows = [{"step": 1, "completions/mean_length": 8.0, "completions/min_length": 7.0, "completions/max_length": 9.0}]
    texts = [
        RecordedResponse(step=1, group="0", prompt="", response="", reward=float(number), length=20 + 2 * number)
        for number in range(2)
    ]
    metrics = Observed(groups_of(texts), trl_metrics(rows)).metrics
    (length,) = [chart for chart in charts_of(metrics) if chart.title == LENGTH]
    (curve,) = length.series
    assert curve.values == [8.0]
    assert curve.low == [7.0]
    assert curve.high == [9.0]


def test_the_name_of_a_reward_function_replaces_no_other_metric() -> None:
    """The reward is the sum, 1 and 3, of which 3 is right; the functions' own means are 0, 1 and 1."""
    responses = [
        RecordedResponse(
            step=1,
            group="0",
            prompt="",
            response="",
            reward=1.0 + correct,
            length=1,
            right=correct > 0,
            parts={"correct": correct, "mean": 0.0, "num_words": 1.0},
        )
        for correct in (0.0, 2.0)
    ]
    metrics = Observed(groups_of(responses)).metrics
    assert metrics["reward/mean"] == {1: 2.0}
    assert metrics["reward/correct"] == {1: 0.5}
    (reward,) = [chart for chart in charts_of(metrics) if chart.title == "Reward"]
    assert [curve.label for curve in reward.series] == ["mean", "num words"]
