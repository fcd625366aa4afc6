"""The report's map of credit: colours of tokens, their layout, and the groups and rollouts it picks."""

from __future__ import annotations

import math

import pytest
from run_folders import group, rollout

from cepo.report.colours import LOWERED, NEUTRAL, RAISED, Rgba, lay_out, shift_colour, visible, weight_colour
from cepo.report.heatmap import pick_groups, pick_rollouts, token_colours, token_weights
from cepo.tracking import RolloutRecord


def is_blue(colour: Rgba) -> bool:
    return colour[2] > colour[0]


def test_weight_1_5_is_blue_on_right_and_red_on_wrong_rollouts() -> None:
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
def test_black_text_has_a_contrast_above_4_5_on_all_colours(colour: Rgba) -> None:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    assert (luminance + 0.05) / 0.05 > 4.5


def test_line_breaks_and_control_characters_become_visible() -> None:
    assert visible("a\n\tb") == "a↵⇥b"
    assert visible("\x07") == "▯"
    assert visible("\U0001f389") == "▯"
    assert visible("") == "∅"
    assert visible("<|im_end|> $x$ 54°") == "<|im_end|> $x$ 54°"


def test_tokens_wrap_at_10_cells_and_long_ones_are_cut() -> None:
    """They wrap after a line break too, and a long token is cut in 3."""
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


def test_weights_follow_from_deltas_if_only_those_are_recorded() -> None:
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


def test_the_two_newest_mixed_groups_with_evidence_are_shown() -> None:
    """They are chosen from 6 groups."""
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


def test_of_each_side_the_most_moved_rollout_is_shown() -> None:
    rollouts = [rollout(right=True, weight=weight) for weight in (1.1, 0.5, 1.2)] + [rollout(right=False, weight=1.3)]
    picked = pick_rollouts(group(1, rollouts))
    assert [record.weight[0] for record in picked if record.weight] == [0.5, 1.3]
