"""A page computes a method from a trace only where its teachers would have read what the recorded ones read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from run_folders import group, rollout, write_run

from cepo.report.recorded_run import load_run
from cepo.report.replayable_methods import comparable_methods
from cepo.run_folder.trace import GroupRecord, RolloutRecord

BLIND = {"blind": "(without images)"}
MASKED = {"masked": "(images masked)"}
CORRECT = {"correct": "24"}
BOTH = {"correct": "24", "wrong": "7"}
WRONG_ONES = {"correct": "24", **{f"wrong_{number}": "7" for number in range(1, 5)}}


def scored(references: dict[str, str], *, right: bool, is_scored: bool = True) -> RolloutRecord:
    """A rollout whose teachers of all views read a reference and were scored."""
    plain = rollout(right=right, delta=None)
    student = plain.log_probs["student"]
    return replace(
        plain,
        log_probs={"student": student, **dict.fromkeys(references, student)},
        references=dict(references),
        is_scored=is_scored,
    )


def without(record: RolloutRecord, view: str, *, reference: bool) -> RolloutRecord:
    """The rollout without log-probs of the view, and without its `reference` as well if that is False."""
    references = dict(record.references)
    if not reference:
        references[view] = None
    return replace(record, log_probs={**record.log_probs, view: None}, references=references)


def pair(references: dict[str, str], *, is_scored: bool = True) -> list[RolloutRecord]:
    """Four rollouts, right and wrong in turn."""
    rollouts: list[RolloutRecord] = []
    for right in (True, False, True, False):
        rollouts.append(scored(references, right=right, is_scored=is_scored))
    return rollouts


def drawn(folder: Path, settings: str, groups: Sequence[GroupRecord]) -> set[str]:
    """The methods with teachers that the page computes; `settings` are lines of the section `algorithm`, then others."""
    write_run(folder, [(groups[0].step, {"loss": 1.0})], config=f"algorithm:\n{settings}", groups=groups)
    return {name for name, method in comparable_methods(load_run(folder), groups) if method.views}


@pytest.mark.parametrize(
    ("settings", "references", "methods"),
    [
        ("  adv_estimator: papo\n", MASKED, {"papo"}),  # masks with 0.6, vppo with 0.5
        ("  adv_estimator: papo\n  vppo: {mask_probability: 0.6}\n", MASKED, {"papo", "vppo"}),
        ("  adv_estimator: vppo\n", MASKED, {"vppo"}),
        ("  adv_estimator: vppo\n  papo: {mask_probability: 0.5}\n", MASKED, {"papo", "vppo"}),
        ("  adv_estimator: pgpo\n", BLIND, {"pgpo", "visual"}),
        ("  adv_estimator: visual\n", BLIND, {"pgpo", "visual"}),
        ("  adv_estimator: cepo\n", BOTH, {"cepo", "contrast_gate", "hindsight", "rlsd"}),
        # hindsight never shows a rollout its own answer.
        ("  adv_estimator: rlsd\n  positive: {source: peer_answer}\n", CORRECT, {"rlsd"}),
        (
            "  adv_estimator: rlsd\n  positive: {source: peer_answer, exclude_self: true}\n",
            CORRECT,
            {"rlsd", "hindsight"},
        ),
        # By default rlcsd_released has a snapshot as its teacher, which reads whole responses.
        ("  adv_estimator: rlcsd\n", WRONG_ONES, {"rlcsd", "rlsd", "hindsight"}),
        (
            "  adv_estimator: rlcsd\n  teacher: {source: actor, sync_every: 1}\n"
            "  positive: {source: ground_truth, exclude_self: false}\n"
            "  negative: {source: peer_answer, select: lowest_reward}\n",
            WRONG_ONES,
            {"rlcsd", "rlcsd_released", "rlsd", "hindsight"},
        ),
        ("  adv_estimator: method_of_a_plugin\n", BOTH, set()),
    ],
)
def test_teachers_of_both_methods_must_read_the_same(
    settings: str, references: dict[str, str], methods: set[str], tmp_path: Path
) -> None:
    assert drawn(tmp_path, settings, [group(1, pair(references))]) == methods


@pytest.mark.parametrize("recorded", [False, True])
def test_a_teacher_with_other_weights_is_another_teacher(recorded: bool, tmp_path: Path) -> None:
    """sdpo's preset is a moving average, rlsd's the live weights, unless the run's setting holds for both."""
    settings = "  adv_estimator: sdpo\n" + "  teacher: {source: ema}\n" * recorded
    assert ("rlsd" in drawn(tmp_path, settings, [group(1, pair(CORRECT))])) == recorded


@pytest.mark.parametrize(("step", "has_hindsight"), [(25, True), (26, False)])
def test_a_step_without_weights_recorded_no_teacher(step: int, has_hindsight: bool, tmp_path: Path) -> None:
    """rlsd's lambda is 0 from step 26 on; hindsight reads its teacher at every step."""
    rollouts = pair(CORRECT)
    if step == 26:
        rollouts = [without(record, "correct", reference=False) for record in rollouts]
    methods = drawn(tmp_path, "  adv_estimator: rlsd\n", [group(step, rollouts)])
    assert ("hindsight" in methods) == has_hindsight
    assert "rlsd" in methods


@pytest.mark.parametrize("all_are_scored", [False, True])
def test_rows_that_only_one_method_learns_from_need_log_probs(all_are_scored: bool, tmp_path: Path) -> None:
    """Of a group whose rewards are equal, training scores no teacher, and `cepo show` every one."""
    flat = [scored(CORRECT, right=True) for _ in range(4)]
    if not all_are_scored:
        flat = [without(record, "correct", reference=True) for record in flat]
    groups = [group(1, pair(CORRECT)), group(1, flat, number=1)]
    assert ("hindsight" in drawn(tmp_path, "  adv_estimator: rlsd\n", groups)) == all_are_scored


def test_vppo_shows_no_masked_image_to_groups_of_equal_rewards(tmp_path: Path) -> None:
    """They learn its bonus alone; papo, which learns from their images, has nothing to read there."""
    settings = "  adv_estimator: vppo\n  papo: {mask_probability: 0.5}\n"
    assert "papo" in drawn(tmp_path, settings, [group(1, pair(MASKED))])
    flat = [without(scored(MASKED, right=True), "masked", reference=False) for _ in range(4)]
    assert "papo" not in drawn(tmp_path, settings, [group(1, pair(MASKED)), group(1, flat, number=1)])


@pytest.mark.parametrize(("fallback", "has_rlsd"), [("student", True), ("neutral", False)])
def test_a_side_that_was_dropped_with_the_other_is_unknown(fallback: str, has_rlsd: bool, tmp_path: Path) -> None:
    """Without a wrong answer `neutral` drops the right one, which rlsd would have read."""
    rollouts = [without(record, "wrong", reference=False) for record in pair(BOTH)]
    if fallback == "neutral":
        rollouts = [without(record, "correct", reference=False) for record in rollouts]
    settings = f"  adv_estimator: cepo\n  negative: {{fallback: {fallback}}}\n"
    assert ("rlsd" in drawn(tmp_path, settings, [group(1, rollouts)])) == has_rlsd


def test_what_no_teacher_could_be_shown_is_nobodys(tmp_path: Path) -> None:
    """An answer without room is missing in every method's context, so that rlsd has no evidence there either."""
    first, *peers = pair(CORRECT)
    first = without(first, "correct", reference=False)
    assert "hindsight" in drawn(tmp_path, "  adv_estimator: rlsd\n", [group(1, [first, *peers])])


def test_a_problem_without_images_has_no_masked_view(tmp_path: Path) -> None:
    rollouts = [without(record, "masked", reference=False) for record in pair(MASKED)]
    settings = "  adv_estimator: papo\n  vppo: {mask_probability: 0.6}\n"
    assert drawn(tmp_path, settings, [group(1, rollouts, images=[])]) == {"papo", "vppo"}


@pytest.mark.parametrize(
    ("temperature", "is_scored", "has_rlsd"), [(1.0, False, True), (0.7, False, False), (0.7, True, True)]
)
def test_the_student_is_compared_at_the_teachers_temperature(
    temperature: float, is_scored: bool, has_rlsd: bool, tmp_path: Path
) -> None:
    """cepo may leave the student unscored; its recorded log-probs are then the engine's, at temperature 1."""
    settings = f"  adv_estimator: cepo\nworker: {{rollout: {{temperature: {temperature}}}}}\n"
    assert ("rlsd" in drawn(tmp_path, settings, [group(1, pair(BOTH, is_scored=is_scored))])) == has_rlsd
