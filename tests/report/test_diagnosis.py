"""Each rule of the diagnosis names its fault and no other, and a sound run is met with silence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from run_folders import write_run

from cepo.report.diagnosis import NOTHING_FOUND, Observed, diagnosed
from cepo.report.findings import findings_lines, findings_section
from cepo.report.page import open_run, write_report
from cepo.report.responses import RecordedResponse, groups_of
from cepo.train import closing_words

STEPS = 12
GROUPS = 8
SIZE = 8
Change = Callable[[RecordedResponse, int], RecordedResponse]


def sound(seed: int = 0) -> list[RecordedResponse]:
    """Responses of a run in which right and wrong ones have the same lengths and words, and the reward rises slowly."""
    generator = numpy.random.default_rng(seed)
    responses: list[RecordedResponse] = []
    for step in range(1, STEPS + 1):
        for number in range(GROUPS):
            for place in range(SIZE):
                right = place < 2 or (place > 3 and bool(generator.random() < 0.4 + 0.02 * step))
                words = " ".join(
                    generator.choice(["so", "then", "angle", "side", "minus"], size=generator.integers(4, 12))
                )
                responses.append(
                    RecordedResponse(
                        step=step,
                        group=str(number),
                        prompt="How long is it? Answer in \\boxed{}.",
                        response=f"{words} \\boxed{{{12 if right else 13}}}",
                        reward=float(right),
                        right=right,
                        finished=True,
                        length=20,
                        surprise=0.5,
                        gap=0.01,
                    )
                )
    return responses


def names(responses: list[RecordedResponse], metrics: Mapping[str, Mapping[int, float]] | None = None) -> list[str]:
    return [finding.name for finding in diagnosed(Observed(groups_of(responses), metrics))]


@pytest.mark.parametrize("seed", range(5))
def test_a_sound_run_is_met_with_silence(seed: int) -> None:
    assert names(sound(seed)) == []
    assert list(findings_lines([])) == [NOTHING_FOUND]
    assert findings_section([]).notes == [NOTHING_FOUND]


def changed(change: Change) -> list[RecordedResponse]:
    return [change(response, number) for number, response in enumerate(sound())]


def with_length_as_reward(response: RecordedResponse, _: int) -> RecordedResponse:
    return replace(response, reward=len(response.response) / 100)


def with_phrase_as_reward(response: RecordedResponse, _: int) -> RecordedResponse:
    return replace(response, reward=float("so then" in response.response))


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (
            lambda each, _: replace(each, finished=False, response="so then", reward=0.0, right=False),
            "responses are cut",
        ),
        (lambda each, _: replace(each, finished=False, response=each.response + " and on"), "responses do not end"),
        (lambda each, _: replace(each, response="5 5 " * 20), "responses repeat themselves"),
        (lambda each, _: replace(each, response=each.response.partition("\\")[0]), "answers are not found"),
        (lambda each, _: replace(each, reward=0.0), "the reward is constant"),
        (
            lambda each, _: replace(each, response="so \\boxed{12}"),
            "responses of a group are equal",
        ),
        (lambda each, _: replace(each, gap=0.3), "sampler and trainer differ"),
        (with_length_as_reward, "length explains the reward"),
        (with_phrase_as_reward, "a phrase explains the reward"),
        (lambda each, n: replace(each, reward=float(n < 7), right=n < 7), "groups have equal rewards"),
        (lambda each, _: replace(each, surprise=0.5 if each.step < 5 else 0.01), "the entropy has collapsed"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_a_fault_in_the_responses_is_named_first(change: Change, first: str) -> None:
    assert names(changed(change))[:1] == [first]


@pytest.mark.parametrize(
    ("metrics", "first"),
    [
        ({"actor/lr": dict.fromkeys(range(1, 5), 0.0)}, "the weights do not change"),
        ({"actor/weight_norm": dict.fromkeys(range(1, 5), 58.5)}, "the weights do not change"),
        ({"actor/pg_clipfrac_higher": dict.fromkeys(range(1, 5), 0.3)}, "updates are clipped"),
        (
            {"reward/mean": {step: step / 12 for step in range(1, 13)}, "val/accuracy": {0: 0.5, 12: 0.4}},
            "held-out accuracy does not follow",
        ),
        (
            {"reward/mean": dict.fromkeys(range(1, 13), 0.8), "val/accuracy": {0: 0.52, 12: 0.15}},
            "held-out accuracy does not follow",
        ),
        ({"rollout/log_prob_gap_mean": {1: 0.5}}, "sampler and trainer differ"),
        ({"response_length/clip_ratio": {1: 0.6}}, "responses are cut"),
        (
            {"val/accuracy": {0: 0.6, 6: 0.72, 12: 0.73}, "val/greedy_accuracy": {0: 0.74, 12: 0.745}},
            "no headroom is left",
        ),
    ],
)
def test_a_fault_in_the_metrics_is_named_first(metrics: Mapping[str, Mapping[int, float]], first: str) -> None:
    """Metrics replace what the responses say, of which a trainer may record a part."""
    assert names(sound(), metrics)[:1] == [first]


@pytest.mark.parametrize(
    ("sampled", "greedy"),
    [
        ({0: 0.6, 6: 0.65, 12: 0.73}, {12: 0.74}),
        ({0: 0.72, 12: 0.72}, {12: 0.75}),
        ({0: 0.98, 12: 0.98}, {12: 0.98}),
        ({0: 0.01, 12: 0.01}, {12: 0.01}),
        ({12: 0.73}, {12: 0.73}),
    ],
    ids=["still gains", "greedy is better", "solved", "knows nothing", "one validation"],
)
def test_headroom_is_told_where_both_figures_say_so(sampled: dict[int, float], greedy: dict[int, float]) -> None:
    assert names(sound(), {"val/accuracy": sampled, "val/greedy_accuracy": greedy}) == []


def test_a_finding_has_its_figure_responses_and_one_thing_to_try() -> None:
    finding = diagnosed(Observed(groups_of(changed(lambda each, _: replace(each, reward=0.0)))))[0]
    assert finding.figure == f"All {STEPS * GROUPS * SIZE} responses have the reward 0."
    assert len(finding.evidence) == 3
    assert "Try: call the reward function" in finding.line()
    section = findings_section([finding])
    assert not section.closed
    assert len(section.responses) == 3


def test_dead_groups_are_told_by_difficulty() -> None:
    observed = Observed([], {"groups/mixed": {1: 0.1}, "groups/all_right": {1: 0.7}, "groups/all_wrong": {1: 0.2}})
    (finding,) = diagnosed(observed)
    assert finding.figure == "90 % of the groups have equal rewards (70 % of all are right throughout, 20 % wrong)."
    assert finding.advice.endswith("harder ones.")


def test_a_run_without_steps_has_no_fault() -> None:
    assert diagnosed(Observed([])) == []


def test_the_report_and_the_end_of_training_have_the_diagnosis(tmp_path: Path) -> None:
    rows = [(step, {"reward/mean": 0.1 * step, "actor/lr": 0.0}) for step in range(1, 5)]
    run = write_run(tmp_path / "run", rows)
    assert "The learning rate was 0 in all 4 steps." in write_report(run).read_text(encoding="utf-8")
    assert "the weights do not change: The learning rate was 0 in all 4 steps." in closing_words(open_run(run))


def test_damaged_rollouts_do_not_fail_a_run_that_has_finished(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [(1, {"reward/mean": 0.5})])
    (run / "rollouts").mkdir(exist_ok=True)
    (run / "rollouts" / "step_00000001.parquet").write_bytes(b"PAR1")
    words = closing_words(open_run(run))
    assert "no diagnosis: " in words
    assert "next: cepo report" in words
