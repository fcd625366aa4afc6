"""Reports from run folders made by hand, with numbers worked out by hand."""

from __future__ import annotations

import io
import math
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image
from rich.console import Console

from cepo.errors import DataError
from cepo.report import compare_runs, run_summary, write_report
from cepo.report.colours import LOWERED, NEUTRAL, RAISED, Rgba, lay_out, shift_colour, visible, weight_colour
from cepo.report.command import run_compare_command, run_report_command
from cepo.report.curves import STAGE_COLOURS, running_mean
from cepo.report.heatmap import pick_groups, pick_rollouts, token_colours, token_weights
from cepo.report.run import load_run
from cepo.report.summary import accuracy_change, tokens_per_second
from cepo.tracking import GroupRecord, RolloutRecord, RunDescription, build_tracker, png_bytes
from cepo.tracking.console import STAGES

PICTURE = png_bytes(Image.new("RGB", (64, 64), (10, 200, 30)))


def write_run(
    folder: Path,
    rows: Sequence[tuple[int, Mapping[str, float]]],
    *,
    config: str = "algorithm:\n  adv_estimator: cepo\n  cepo:\n    clip_radius: 0.5\n",
    groups: Sequence[GroupRecord] = (),
    generations: Mapping[int, Sequence[Mapping[str, object]]] | None = None,
) -> Path:
    tracker = build_tracker(["file"], RunDescription(folder=folder, config_text=config, max_steps=2))
    for step, values in rows:
        tracker.log_metrics(step, values)
    tracker.log_rollouts(groups)
    for step, samples in (generations or {}).items():
        tracker.log_generations(step, samples)
    tracker.close()
    return folder


def validated(*accuracies: float, every: int = 1) -> list[tuple[int, dict[str, float]]]:
    return [(every * k, {"val/accuracy": value, "val/num_samples": 100}) for k, value in enumerate(accuracies)]


def rollout(*, right: bool, tokens: Sequence[str] = ("5", " sides", "\n"), weight: float | None = 1.5) -> RolloutRecord:
    advantage = 1.0 if right else -1.0
    count = len(tokens)
    delta = None if weight is None else [math.copysign(1.0, advantage) * math.log(weight)] * count
    return RolloutRecord(
        response="".join(tokens),
        tokens=tokens,
        reward=float(right),
        accuracy=float(right),
        advantage=advantage,
        token_advantages=[advantage * (weight or 1.0)] * count,
        delta=delta,
        weight=None if weight is None else [weight] * count,
    )


def group(
    step: int, rollouts: Sequence[RolloutRecord], *, prompt_id: str = "p", problem: str = "How long?"
) -> GroupRecord:
    references = {"correct": "24", "wrong": None}
    fields = {"prompt_id": prompt_id, "problem": problem, "ground_truth": "24", "image": PICTURE}
    return GroupRecord(step=step, references=references, rollouts=rollouts, **fields)  # type: ignore[arg-type]


def shown(table: object, width: int = 110) -> str:
    output = io.StringIO()
    Console(file=output, width=width).print(table)
    return output.getvalue()


def is_blue(colour: Rgba) -> bool:
    return colour[2] > colour[0]


def test_weight_1_and_a_half_is_blue_on_a_right_rollout_and_red_on_a_wrong_one() -> None:
    assert is_blue(weight_colour(1.2, advantage=0.9))
    assert not is_blue(weight_colour(1.2, advantage=-0.9))
    assert not is_blue(weight_colour(0.8, advantage=0.9))
    assert is_blue(weight_colour(0.8, advantage=-0.9))
    assert weight_colour(1.5, advantage=0.9) == pytest.approx(RAISED)
    assert weight_colour(1.5, advantage=-0.9) == pytest.approx(LOWERED)


def test_weight_1_and_advantage_0_and_radius_0_are_white() -> None:
    assert weight_colour(1.0) == NEUTRAL
    assert weight_colour(1.4, advantage=0.0) == NEUTRAL
    assert weight_colour(1.0, clip_radius=0.0) == NEUTRAL


def test_half_a_shift_is_halfway_to_blue_and_2_is_clamped_to_1() -> None:
    assert shift_colour(0.5) == pytest.approx(tuple((1 + end) / 2 for end in RAISED))
    assert shift_colour(2.0) == shift_colour(1.0)
    assert shift_colour(math.nan) not in (NEUTRAL, RAISED, LOWERED)


@pytest.mark.parametrize("colour", [RAISED, LOWERED])
def test_black_text_has_a_contrast_above_4_and_a_half_on_the_strongest_colours(colour: Rgba) -> None:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    assert (luminance + 0.05) / 0.05 > 4.5


def test_each_of_the_9_stages_has_a_colour_of_its_own() -> None:
    assert set(STAGE_COLOURS) == set(STAGES)
    assert len({to_rgb(colour) for colour in STAGE_COLOURS.values()}) == 9


def test_line_breaks_tabs_controls_and_unknown_characters_become_visible() -> None:
    assert visible("a\n\tb") == "a↵⇥b"
    assert visible("\x07") == "▯"
    assert visible("\U0001f389") == "▯"
    assert visible("") == "∅"
    assert visible("<|im_end|> $x$ 54°") == "<|im_end|> $x$ 54°"


def test_tokens_wrap_at_10_cells_and_after_a_line_break_and_a_long_one_is_cut_in_3() -> None:
    boxes = lay_out(["abcd", "efgh", "ij", "\n", "k", "l" * 25], 10)
    assert [(box.token, box.row, box.text) for box in boxes] == [
        (0, 0, "abcd"),
        (1, 0, "efgh"),
        (2, 1, "ij"),
        (3, 1, "↵"),
        (4, 2, "k"),
        (5, 3, "l" * 10),
        (5, 4, "l" * 10),
        (5, 5, "l" * 5),
    ]
    assert all(box.column + len(box.text) <= 10 for box in boxes)


def test_weights_follow_from_deltas_where_only_those_were_recorded() -> None:
    record = RolloutRecord(
        response="abc",
        tokens=["a", "b", "c"],
        reward=0,
        accuracy=0,
        advantage=-0.5,
        token_advantages=[-0.5] * 3,
        delta=[0.1, 5.0, -5.0],
    )
    assert token_weights(record, clip_radius=0.5) == pytest.approx([math.exp(-0.1), 0.5, 1.5])


def test_without_evidence_the_plain_advantages_give_blue_and_red() -> None:
    right, wrong = rollout(right=True, weight=None), rollout(right=False, weight=None)
    assert token_colours(right, clip_radius=0.5, largest_advantage=1.0) == [pytest.approx(RAISED)] * 3
    assert token_colours(wrong, clip_radius=0.5, largest_advantage=1.0) == [pytest.approx(LOWERED)] * 3
    assert token_colours(wrong, clip_radius=0.5, largest_advantage=0.0) == [NEUTRAL] * 3


def test_the_two_newest_mixed_groups_with_evidence_are_picked_from_6() -> None:
    both = [rollout(right=True), rollout(right=False)]
    plain = [rollout(right=True, weight=None), rollout(right=False, weight=None)]
    groups = [
        group(1, both, prompt_id="a"),
        group(2, both, prompt_id="b"),
        group(2, both, prompt_id="c"),
        group(3, [rollout(right=True)], prompt_id="not mixed"),
        group(3, plain, prompt_id="no evidence"),
        group(4, [], prompt_id="empty"),
    ]
    assert [found.prompt_id for found in pick_groups(groups)] == ["b", "c"]
    assert [found.prompt_id for found in pick_groups(groups[4:])] == ["no evidence"]
    assert [found.prompt_id for found in pick_groups(groups[3:4])] == ["not mixed"]


def test_of_each_side_the_rollout_that_evidence_moves_most_is_shown() -> None:
    rollouts = [rollout(right=True, weight=weight) for weight in (1.1, 0.5, 1.2)] + [rollout(right=False, weight=1.3)]
    picked = pick_rollouts(group(1, rollouts))
    assert [record.weight[0] for record in picked if record.weight] == [0.5, 1.3]


def test_a_running_mean_of_2_over_1_3_5_is_1_2_4() -> None:
    assert running_mean([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]


def report_pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(float) / 255


def holds_colour(pixels: np.ndarray, colour: Sequence[float]) -> int:
    return int((np.abs(pixels - np.asarray(colour[:3])).max(axis=2) < 0.01).sum())


def test_the_report_shows_curves_picture_and_blue_boxes_for_credit_of_1_and_a_half(tmp_path: Path) -> None:
    rows = [(0, {"val/accuracy": 0.4}), (1, {"reward/accuracy": 0.5, "timing_s/generate": 1.0, "timing_s/step": 2.0})]
    right, wrong = rollout(right=True, weight=1.5), rollout(right=False, weight=1.0)
    one = write_run(tmp_path / "one", rows, groups=[group(1, [right, wrong], problem="What is $x$ for 5$ & \\boxed{?")])
    none = write_run(tmp_path / "none", rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert write_report(one) == tmp_path / "one" / "report.png"
        assert write_report(none, tmp_path / "deep" / "none.png") == tmp_path / "deep" / "none.png"
    with_map, without = report_pixels(one / "report.png"), report_pixels(tmp_path / "deep" / "none.png")
    assert with_map.shape[1] > 1200
    assert with_map.shape[0] > without.shape[0] + 200
    assert without.std() > 0.02
    assert holds_colour(with_map, (10 / 255, 200 / 255, 30 / 255)) > 10_000  # the picture
    assert holds_colour(with_map[700:], RAISED) > 3_000  # boxes, below the scale
    assert holds_colour(with_map[700:], LOWERED) == 0
    assert holds_colour(without, RAISED) == 0


def test_a_response_of_2000_tokens_with_newlines_and_specials_is_drawn_within_3000_pixels(tmp_path: Path) -> None:
    tokens = ["Let ", "$x", "^", "2$", "\n", "角", "\U0001f389", "<|im_end|>", "\x00", "�"] * 200
    groups = [group(1, [rollout(right=right, tokens=tokens) for right in (True, False)])]
    run = write_run(tmp_path, [(1, {"reward/accuracy": 0.5})], groups=groups)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pixels = report_pixels(write_report(run))
    assert 1000 < pixels.shape[0] < 3000


def test_a_grpo_run_shows_plain_advantages_in_both_colours(tmp_path: Path) -> None:
    plain = [rollout(right=right, weight=None) for right in (True, False)]
    config = "algorithm:\n  adv_estimator: grpo\n"
    rows = [(1, {"reward/accuracy": 0.5, "groups/mixed": 1.0})]
    pixels = report_pixels(write_report(write_run(tmp_path, rows, config=config, groups=[group(1, plain)])))
    assert holds_colour(pixels[700:], RAISED) > 1_000
    assert holds_colour(pixels[700:], LOWERED) > 1_000


def with_evidence(mixing: float, positive: float, negative: float, weight: float) -> dict[str, float]:
    names = ("lambda", "positive_fraction", "negative_fraction", "weight_mean")
    return {f"evidence/{name}": value for name, value in zip(names, (mixing, positive, negative, weight), strict=True)}


SUMMARY_ROWS = [
    (0, {"val/accuracy": 0.36, "val/num_samples": 100}),
    (1, with_evidence(0.5, 0.2, 0.1, 1.0) | {"timing_s/generate": 1.0, "tokens/generate": 300, "timing_s/step": 4.0}),
    (2, {"timing_s/generate": 9.0, "timing_s/step": 5.0}),
    (3, with_evidence(0.25, 0.4, 0.2, 1.25) | {"timing_s/generate": 2.0, "tokens/generate": 900, "timing_s/step": 6.0}),
    (3, {"val/accuracy": 0.5, "val/num_samples": 100}),
]


def test_the_summary_says_36_to_50_percent_and_a_difference_of_14_points(tmp_path: Path) -> None:
    text = shown(run_summary(write_run(tmp_path, SUMMARY_ROWS)))
    assert "0.360 ± 0.048 (n 100), step 0" in text
    assert "0.500 ± 0.050 (n 100), step 3" in text
    assert "+14.0 points ± 6.9 (as if the two were independent)" in text  # sqrt(.048^2 + .05^2)
    assert "30.0 %" in text
    assert "15.0 %" in text
    assert "1.1250" in text
    assert "0.500 to 0.250" in text
    assert "2.00 s, 400 tokens/s" in text  # median of 1, 9, 2; 1200 tokens in the 3 s of the steps that counted them
    assert "5.00 s" in text


def test_tokens_per_second_needs_both_counts_and_seconds(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path, SUMMARY_ROWS))
    assert tokens_per_second(run, "generate") == 400
    assert tokens_per_second(run, "update") is None


def test_tokens_of_teachers_count_as_scored_in_steps_that_have_no_seconds_of_their_own(tmp_path: Path) -> None:
    counted = {"tokens/score": 100, "timing_s/score": 1.0, "tokens/teachers": 500}
    run = load_run(write_run(tmp_path, [(1, counted), (2, counted | {"timing_s/teachers": 5.0})]))
    assert tokens_per_second(run, "score") == 350  # 600 in the first second, 100 in the other
    assert tokens_per_second(run, "teachers") == 100


def test_the_paired_error_of_4_problems_with_1_changed_is_25_points(tmp_path: Path) -> None:
    def samples(*right: float) -> list[dict[str, object]]:
        return [{"prompt_id": str(k), "response": "", "accuracy": value} for k, value in enumerate(right)]

    rows = [(step, {"val/accuracy": value, "val/num_samples": 4}) for step, value in ((0, 0.25), (1, 0.5))]
    paired = write_run(tmp_path / "a", rows, generations={0: samples(1, 0, 0, 0), 1: samples(1, 1, 0, 0)})
    change = accuracy_change(load_run(paired))
    assert change is not None
    assert change.paired
    assert change.difference == 0.25
    assert change.difference_error == pytest.approx(0.25)  # differences 0 1 0 0: deviation 0.5, over sqrt(4)
    incomplete = write_run(tmp_path / "b", rows, generations={0: samples(1, 0, 0), 1: samples(1, 1, 0)})
    change = accuracy_change(load_run(incomplete))
    assert change is not None
    assert not change.paired
    assert change.difference_error == pytest.approx(math.hypot(math.sqrt(0.25 * 0.75 / 4), math.sqrt(0.5 * 0.5 / 4)))


def test_a_summary_of_1_step_without_validation_or_evidence_says_so(tmp_path: Path) -> None:
    text = shown(run_summary(write_run(tmp_path, [(1, {"reward/mean": 0.5})])))
    assert "not measured" in text
    assert "none: this run consulted no teacher" in text


def method_run(folder: Path, estimator: str, seed: int, accuracies: Sequence[float], extra: str = "") -> Path:
    config = f"algorithm:\n  adv_estimator: {estimator}\ntrainer:\n  seed: {seed}\n{extra}"
    return write_run(folder, validated(*accuracies, every=10), config=config)


def test_three_seeds_of_40_50_60_percent_have_deviation_10_and_error_6_points(tmp_path: Path) -> None:
    ends = (0.4, 0.5, 0.6)
    folders = [method_run(tmp_path / f"c{k}", "cepo", k, (0.3, 0.7 - 0.01 * k, end)) for k, end in enumerate(ends)]
    folders.append(method_run(tmp_path / "g", "grpo", 0, (0.3, 0.35, 0.4)))
    comparison = compare_runs(folders)
    cepo, grpo = comparison.methods
    assert (cepo.estimator, grpo.estimator) == ("cepo", "grpo")
    assert cepo.end.mean == pytest.approx(0.5)
    assert cepo.end.deviation == pytest.approx(0.1)
    assert cepo.end.error == pytest.approx(0.1 / math.sqrt(3))
    assert cepo.start.deviation == pytest.approx(0.0)
    assert (cepo.best_step, cepo.best.mean) == (10, pytest.approx(0.69))
    assert cepo.rise.mean == pytest.approx(0.2)
    assert grpo.end.deviation is None
    markdown = comparison.markdown()
    assert "| cepo | 3 | 0.300 ± 0.000 (se 0.000), step 0 | 0.690 ± 0.010 (se 0.006), step 10 |" in markdown
    assert "| 0.500 ± 0.100 (se 0.058), step 20 | +20.0 ± 10.0 (se 5.8) | 0.400, 0.500, 0.600 |" in markdown
    assert "| grpo | 1 | 0.300, step 0 | 0.400, step 20 | 0.400, step 20 | +10.0 | 0.400 |" in markdown
    assert len(comparison.notes) == 1


def test_runs_are_compared_at_the_steps_that_all_of_a_method_measured(tmp_path: Path) -> None:
    folders = [
        method_run(tmp_path / "a", "cepo", 0, (0.3, 0.4, 0.9)),
        method_run(tmp_path / "b", "cepo", 1, (0.3, 0.5)),
    ]
    (method,) = compare_runs(folders).methods
    assert method.steps == (0, 10)
    assert method.end.mean == pytest.approx(0.45)


def test_repeats_that_differ_in_learning_rate_or_share_a_seed_are_named(tmp_path: Path) -> None:
    folders = [
        method_run(tmp_path / f"r{k}", name, 0, (0.3, 0.4), f"worker:\n  actor:\n    optim:\n      lr: {rate}\n")
        for k, (name, rate) in enumerate((("cepo", 1e-6), ("cepo", 5e-6), ("grpo", 1e-6)))
    ]
    notes = "\n".join(compare_runs(folders).notes)
    assert "The runs of cepo differ in worker.actor.optim.lr" in notes
    assert "Some runs of cepo have the same seeds" in notes
    assert "worker.actor.optim.lr differs (cepo: 1e-06, 5e-06; grpo: 1e-06)" in notes


def test_runs_without_a_common_validation_step_are_an_error_that_names_them(tmp_path: Path) -> None:
    folders = [method_run(tmp_path / "a", "cepo", 0, (0.3,)), write_run(tmp_path / "b", [(1, {"reward/mean": 0.5})])]
    with pytest.raises(DataError, match=r"cepo \(a, b\) share no step"):
        compare_runs(folders)


def test_cepo_compare_writes_markdown_and_a_plot_and_returns_0(tmp_path: Path) -> None:
    folders = [str(method_run(tmp_path / f"r{k}", "cepo", k, (0.3, 0.4 + 0.1 * k))) for k in range(2)]
    out, plot = tmp_path / "docs" / "table.md", tmp_path / "plots" / "curves.png"
    output = io.StringIO()
    code = run_compare_command(
        [*folders, "--out", str(out), "--plot", str(plot)], console=Console(file=output, width=80)
    )
    assert code == 0
    assert "| cepo | 2 |" in out.read_text("utf-8")
    pixels = report_pixels(plot)
    assert (pixels.shape[:2], pixels.std() > 0.02) == ((644, 1050), True)
    assert "curves.png" in output.getvalue()


def test_cepo_report_prints_the_table_and_the_path_of_the_picture(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", SUMMARY_ROWS)
    output = io.StringIO()
    assert run_report_command([str(run), "--out", str(tmp_path / "p.png")], console=Console(file=output, width=80)) == 0
    assert "+14.0 points" in output.getvalue()
    assert output.getvalue().endswith(f"picture: {tmp_path / 'p.png'}\n")
    assert (tmp_path / "p.png").stat().st_size > 20_000


@pytest.mark.parametrize("command", [run_report_command, run_compare_command])
def test_a_missing_folder_file_or_row_ends_with_exit_code_2_and_its_name(
    command: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(command)
    (tmp_path / "empty").mkdir()
    (tmp_path / "started").mkdir()
    (tmp_path / "started" / "metrics.jsonl").touch()
    for name, message in (("nowhere", "does not exist"), ("empty", "metrics.jsonl"), ("started", "no rows yet")):
        assert command([str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert name in error
        assert message in error
    assert command([]) == 2
    assert command(["--help"]) == 0


def test_a_config_that_is_no_yaml_mapping_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    for text in ("a: [", "- 1\n- 2\n"):
        run = write_run(tmp_path / text[0], [(1, {"reward/mean": 0.5})], config=text)
        with pytest.raises(DataError, match=r"config\.yaml"):
            load_run(run)


def test_the_report_loads_no_torch_when_imported() -> None:
    program = (
        "import sys, cepo.report, cepo.report.command; print([n for n in ('torch', 'ray', 'vllm') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
