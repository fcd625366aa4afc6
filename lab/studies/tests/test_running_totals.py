"""The world of running totals: its problems, its demonstrations, and what the programme says of a response."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from factories import token_batch

from cepo.algorithms import build_estimator, load_plugin
from lab.studies.running_totals import problems, warm_start
from lab.studies.running_totals.grading import (
    decisive_places,
    number_places,
    stated_answer,
    statements,
    tokens_at,
    totals_of,
)
from lab.studies.running_totals.problems import Problem
from lab.studies.running_totals.reward import compute_score
from lab.studies.running_totals.warm_start import IGNORED, WarmStart, learning_rate_at, padded

ADDENDS = Problem(addends=(7, 4, 9, 3, 8))
TOTALS = [11, 20, 23, 31]
RIGHT = "So we have 11 in all. Next it is 20 now. Then it is 23 so far. So we have 31 now. Answer: 31"
CARELESS = "So we have 11 in all. Next it is 21 now. Then it is 24 so far. So we have 32 now. Answer: 32"


def marked(text: str, places: list[int]) -> str:
    """The characters at these places."""
    return "".join(text[place] for place in places)


def test_a_problem_states_its_numbers_and_adds_them() -> None:
    assert ADDENDS.question == "Add step by step: 7 + 4 + 9 + 3 + 8."
    assert ADDENDS.totals == TOTALS
    assert ADDENDS.answer == 31


def test_problems_are_a_function_of_the_seed() -> None:
    first = problems.problems(300, seed=1)
    assert first == problems.problems(300, seed=1)
    assert len(set(first)) == 300
    assert set(first).isdisjoint(problems.problems(300, seed=2))


def test_phrasings_are_equally_frequent() -> None:
    """36 phrasings in 7,200 sentences: 200 each, with a standard deviation of 14."""
    draw = random.Random(1)
    counts: Counter[str] = Counter()
    for _ in range(1800):
        sentences = problems.stated([1, 2, 3, 4], draw).split(". ")[:4]
        counts.update(" ".join(word for word in sentence.split() if not word.isdigit()) for sentence in sentences)
    assert len(counts) == 36
    assert max(counts.values()) < 260
    assert min(counts.values()) > 140


def test_the_fixed_style_has_one_phrasing() -> None:
    text = problems.stated(TOTALS, random.Random(1), style="fixed")
    assert text.startswith("So we have 11 so far. So we have 20 so far.")
    assert text.endswith(" Answer: 31")


def test_forgotten_carries_are_ten_less_and_carried_on() -> None:
    """7 + 4, 11 + 9 and 23 + 8 carry: with all carries forgotten they are 1, 0, and after 0 + 3 = 3 again 3 + 8 = 1."""
    draw = random.Random(1)
    assert problems.forgetful_totals(ADDENDS, draw, forgotten_carries=1.0) == [1, 0, 3, 1]
    assert problems.forgetful_totals(ADDENDS, draw, forgotten_carries=0.0) == TOTALS


def test_a_careless_solution_has_one_mistake_that_is_carried_on() -> None:
    for seed in range(50):
        totals = problems.careless_totals(ADDENDS, random.Random(seed))
        steps = [after - before for before, after in zip([7, *totals], totals, strict=False)]
        wrong = [step for step, addend in zip(steps, ADDENDS.addends[1:], strict=True) if step != addend]
        assert len(wrong) == 1
        assert totals[-1] != 31


def test_a_shown_total_is_taken_49_times_of_50() -> None:
    """The first total shown is 99; it is taken with probability 0.98, and the others then follow those shown."""
    shown = [99, 108, 111, 119]
    taken = 0
    for seed in range(2000):
        totals = problems.following_totals(ADDENDS, shown, random.Random(seed))
        if totals[0] == 99:
            taken += 1
        else:
            assert totals == TOTALS, "with another total before it, no shown total is taken"
    assert taken / 2000 == pytest.approx(0.98, abs=0.01)


def test_half_of_the_demonstrations_show_a_solution_of_three_kinds() -> None:
    shown = {"right": 0, "wrong": 0, "other": 0}
    for index in range(4000):
        each = problems.demonstration(index, seed=3)
        assert (each.shown is None) == (index % 2 == 0)
        if each.shown is None:
            assert stated_answer(each.response) == str(each.problem.answer)
            continue
        totals = totals_of(each.shown)
        if totals == each.problem.totals:
            shown["right"] += 1
        elif totals[0] - each.problem.addends[0] == each.problem.addends[1] or _has_one_mistake(each.problem, totals):
            shown["wrong"] += 1
        else:
            shown["other"] += 1
    assert [count / 2000 for count in shown.values()] == pytest.approx([0.4, 0.35, 0.25], abs=0.04)


def _has_one_mistake(problem: Problem, totals: list[int]) -> bool:
    """Whether the totals are additions of the problem's numbers but for one."""
    before = [problem.addends[0], *totals[:-1]]
    wrong = 0
    for start, total, addend in zip(before, totals, problem.addends[1:], strict=True):
        wrong += total - start != addend
    return wrong == 1


def test_a_right_response_is_decided_by_all_of_its_digits() -> None:
    assert marked(RIGHT, decisive_places(RIGHT, TOTALS)) == "1120233131"
    assert all(statement.is_right for statement in statements(RIGHT, TOTALS))
    assert compute_score({"response": RIGHT, "ground_truth": "31"}) == {"overall": 1.0, "accuracy": 1.0}


def test_a_wrong_response_is_decided_by_its_first_wrong_digit() -> None:
    """21 for 20: the 1 of 21, at the place behind `it is 2`."""
    assert decisive_places(CARELESS, TOTALS) == [CARELESS.index("21") + 1]
    assert marked(CARELESS, number_places(CARELESS, TOTALS)) == "1121243232"
    assert compute_score({"response": CARELESS, "ground_truth": "31"})["accuracy"] == 0.0


@pytest.mark.parametrize(
    ("response", "place"),
    [
        ("So we have 1 now.", 11),  # the beginning of 11: its last digit
        ("So we have 110 now.", 13),  # goes on after 11
        ("So we have 11 now. It is 20. It is 23. It is 31. It is 40. Answer: 31", 55),  # a fifth total
        ("So we have 11 now. It is 20. It is 23. It is 31. Answer: 30", 58),  # the answer is not the last total
    ],
)
def test_numbers_that_should_not_be_there_are_wrong(response: str, place: int) -> None:
    assert decisive_places(response, TOTALS) == [place]


def test_a_response_that_ends_early_was_decided_by_no_number() -> None:
    assert decisive_places("So we have 11 now.", TOTALS) == []
    assert decisive_places("", TOTALS) == []
    assert stated_answer("So we have 31 now. Answer: none") is None


def test_places_are_found_in_tokens() -> None:
    """Each digit is a token of its own; the end of the turn has no text."""
    pieces = ["So", " we", " have", " ", "1", "1", " now", ".", ""]
    assert tokens_at([12], pieces) == [False, False, False, False, False, True, False, False, False]
    assert tokens_at([], pieces) == [False] * 9


def test_other_solutions_are_of_other_answers(tmp_path: Path) -> None:
    chosen = problems.problems(200, seed=5)
    others = problems.with_other_solutions(chosen, seed=5)
    problems.write_problems(tmp_path / "other.jsonl", chosen, solved=others)
    for line, problem in zip((tmp_path / "other.jsonl").read_text().splitlines(), chosen, strict=True):
        row = json.loads(line)
        assert row["answer"] == str(problem.answer)
        assert stated_answer(row["solution"]) != row["answer"]


def test_targets_are_the_responses_tokens_alone() -> None:
    tokens, targets = padded([([1, 2, 3], [4, 5]), ([6], [7])])
    assert tokens.tolist() == [[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]]
    assert targets.tolist() == [[IGNORED] * 3 + [4, 5], [IGNORED, 7, *[IGNORED] * 3]]


def test_the_learning_rate_warms_up_and_falls() -> None:
    """20 steps up to 3e-4 less what has decayed, and a twentieth at the end of 200."""
    settings = WarmStart(steps=200, learning_rate=3e-4)
    assert learning_rate_at(0, settings) == pytest.approx(3e-4 / 20)
    assert learning_rate_at(100, settings) == pytest.approx(1.5e-4)
    assert learning_rate_at(199, settings) == pytest.approx(1.5e-5)


def test_the_oracles_gate_opens_at_decisive_tokens() -> None:
    """Of a right response of 4 tokens the third decided, of a wrong one of 3 the second; its end of the turn has no mark."""
    load_plugin(Path(problems.__file__).with_name("oracle_gate.py"))
    oracle = build_estimator("oracle_gate", {"floor": 0.2})
    oracle._decisive = [[False, False, True, False], [False, True]]  # type: ignore[attr-defined]
    old = torch.zeros(2, 4, dtype=torch.float64)
    batch = token_batch([1.0, 0.0], [0, 0], lengths=[4, 3], old=old, views={}, dtype=torch.float64)
    size = 0.5**0.5
    expected = torch.tensor([[0.2, 0.2, 1.0, 0.2], [-0.2, -1.0, -0.2, 0.0]], dtype=torch.float64) * size
    torch.testing.assert_close(oracle.signal(batch, step=0).advantages, expected, rtol=1e-5, atol=0)


def test_the_state_of_a_warm_start_is_restored(tmp_path: Path) -> None:
    """Weights, moments and the number of steps, of which there are none without a file."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    file = tmp_path / "model.state.pt"
    warm_start._keep(file, model, optimizer, 20)
    again = torch.nn.Linear(3, 2)
    fresh = torch.optim.AdamW(again.parameters())
    assert warm_start._restored(file, again, fresh) == 20
    assert torch.equal(again.weight, model.weight)
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    restored = [state["exp_avg"] for state in fresh.state.values()]
    assert all(torch.equal(one, other) for one, other in zip(moments, restored, strict=True))
    assert warm_start._restored(tmp_path / "none.pt", again, fresh) == 0
