"""The credit of rollouts that another trainer gathered: rewards, groups of several sizes, tools, and what teachers read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from cepo.algorithms import build_estimator
from cepo.integrations.adapter import MethodAdapter, Row, Shown
from cepo.microgeo.world import ASSETS
from cepo.models.text_codec import TextCodec
from cepo.rewards.pool import RewardPool
from cepo.types import RolloutGroup, TokenSignal


@pytest.fixture(scope="module")
def texts() -> TextCodec:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS)
    return TextCodec(tokenizer, [tokenizer.eos_token_id])


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    from cepo.config.worker_schema import RewardConfig

    with RewardPool(RewardConfig()) as pool:
        yield pool


class Gathered:
    """Rollouts with the answers of `said`, and what a method makes of them; the true answer is 7."""

    def __init__(self, texts: TextCodec, pool: RewardPool, method: str, **settings: Any) -> None:
        self.estimator = build_estimator(method, settings)
        self.credit = MethodAdapter(self.estimator, texts, 0, None)
        self.credit.__dict__["_pool"] = pool  # one for all tests: a process takes a second to start
        self.texts = texts
        self.shown: Shown = {}
        self.live = torch.zeros(0)
        self.groups: list[RolloutGroup] = []
        choose = self.estimator.references

        def noted(group: RolloutGroup) -> Any:
            self.groups.append(group)
            return choose(group)

        self.estimator.references = noted

    def row(self, said: str, own: Sequence[bool] = ()) -> Row:
        tokens = self.texts.encode_text(said)
        is_policys = [True] * len(tokens)
        is_policys[: len(own)] = own
        return Row(
            response_ids=tuple(tokens),
            own=is_policys,
            ground_truth="7",
            solution=None,
            has_images=False,
        )

    def signal(self, rows: Sequence[Row], rewards: Sequence[float], sizes: Sequence[int], **more: Any) -> TokenSignal:
        width = max(len(row.own) for row in rows)
        student = torch.arange(len(rows) * width).reshape(len(rows), width) / -100.0

        def score(live: Tensor, shown: Shown) -> tuple[Tensor, dict[str, Tensor]]:
            self.live = live
            self.shown = shown
            teachers = {view: student - 0.5 * len(view) for view in shown}
            return student, teachers

        of_rows = torch.tensor(rewards)
        correct = of_rows >= 0.5
        return self.credit.signal(rows, of_rows, correct, sizes, score, step=0, **more)

    def texts_of(self, view: str) -> list[str | None]:
        texts: list[str | None] = []
        for hint in self.shown[view]:
            texts.append(None if hint is None else hint.text)
        return texts


RIGHT = r"so \boxed{7}"
WRONG = r"it is \boxed{4}"
OTHER = r"then \boxed{5}"
SILENT = "it is nothing"


def test_a_rollout_without_a_reward_is_as_if_it_was_not_there(texts: TextCodec, pool: RewardPool) -> None:
    """NaN, TRL's reward if every function returned None; of the second group one rollout is left, so that it is dropped."""
    cepo = Gathered(texts, pool, "cepo")
    grpo = Gathered(texts, pool, "grpo")
    rows = [cepo.row(said) for said in (RIGHT, OTHER, WRONG, RIGHT, WRONG)]
    rewards = [1.0, math.nan, 0.0, 1.0, math.nan]
    sizes = [3, 2]
    advantages = cepo.signal(rows, rewards, sizes).advantages
    assert cepo.texts_of("wrong") == ["4", None, "4", None, None]
    assert cepo.live.tolist() == [True, False, True, False, False]
    assert not advantages[[1, 3, 4]].any()

    pair = [rows[0], rows[2]]
    of_pair = grpo.signal(pair, [1.0, 0.0], [2]).advantages
    of_all = grpo.signal(rows, rewards, sizes).advantages
    width = of_pair.shape[1]
    assert torch.equal(of_all[[0, 2], :width], of_pair)
    assert torch.equal(advantages[[0, 2], :width].sign(), of_pair.sign())


def test_rollouts_without_any_reward_have_no_advantage(texts: TextCodec, pool: RewardPool) -> None:
    cepo = Gathered(texts, pool, "cepo")
    rows = [cepo.row(RIGHT), cepo.row(WRONG), cepo.row(OTHER)]
    advantages = cepo.signal(rows, [math.nan, math.nan, math.nan], [2, 1]).advantages
    assert advantages.shape == (3, max(len(row.own) for row in rows))
    assert not advantages.any()


def test_a_penalty_above_one_half_makes_no_right_rollout_wrong(texts: TextCodec, pool: RewardPool) -> None:
    """Row 0 is right with reward 1 and a penalty of 2 nats, so that -1 is the lowest sum; teachers read row 2's answer.

    Of the sums -1, 1 and 0 GRPO's advantages are -1, 1 and 0, at each token.
    """
    gathered = Gathered(texts, pool, "cepo", weight={"lambda_schedule": "constant"})
    rows = [gathered.row(RIGHT), gathered.row(RIGHT), gathered.row(WRONG)]
    penalties = torch.zeros(3, len(rows[2].own))
    penalties[0, 1] = 2.0
    signal = gathered.signal(rows, [1.0, 1.0, 0.0], [3], penalties=penalties)
    assert gathered.texts_of("wrong") == ["4", "4", "4"]
    penalised, right, wrong = signal.advantages.sign()
    assert penalised.sum() == -len(rows[0].own)
    assert right.sum() == len(rows[1].own)
    assert not wrong.any()


def test_a_penalty_is_taken_from_the_token_that_has_it(texts: TextCodec, pool: RewardPool) -> None:
    """Returns of one row with reward 1 and 0.5 on its first token: 0.5, then 1 for each later token; and with a tool's, 1."""
    gathered = Gathered(texts, pool, "reinforce_plus_plus")
    rows = [gathered.row(RIGHT, [True, False]), gathered.row(WRONG)]
    width = max(len(row.own) for row in rows)
    penalties = torch.zeros(2, width)
    penalties[0, 0] = 0.5
    penalties[0, 1] = 9.0  # of a tool's token
    token_rewards: list[Tensor] = []
    compute = gathered.estimator.signal

    def noted(batch: Any, *, step: int) -> TokenSignal:
        token_rewards.append(batch.token_level_rewards)
        return compute(batch, step=step)

    gathered.estimator.signal = noted
    gathered.signal(rows, [1.0, 0.0], [1, 1], penalties=penalties)
    last_token = len(rows[0].own) - 1
    expected = torch.zeros(2, width)
    expected[0, 0] = -0.5
    expected[0, last_token] = 1.0
    assert torch.equal(token_rewards[0], expected)


def test_every_group_has_a_prompt_of_its_own(texts: TextCodec, pool: RewardPool) -> None:
    """Random choices are drawn by the prompt's number, which must not start again for groups of another size."""
    gathered = Gathered(texts, pool, "cepo", negative={"select": "random"})
    rows = [gathered.row(said) for said in (RIGHT, WRONG, RIGHT, WRONG, RIGHT, WRONG, OTHER)]
    gathered.signal(rows, [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0], [2, 2, 3])
    assert [group.prompt_id for group in gathered.groups] == ["0", "1", "2"]
    assert [len(group.rollouts) for group in gathered.groups] == [2, 2, 3]


def test_a_reward_belongs_to_the_last_token_of_the_policy(texts: TextCodec, pool: RewardPool) -> None:
    """The second and third token are a tool's: the last of the policy's n - 2 tokens is token n, not token n - 2."""
    gathered = Gathered(texts, pool, "grpo")
    rows: list[Row] = []
    for said in ("7 is it", "4 is it"):
        row = gathered.row(said)
        first_tokens = row.response_ids[:4]
        rows.append(row._replace(response_ids=first_tokens, own=[True, False, False, True]))
    of_right, of_wrong = gathered.signal(rows, [1.0, 0.0], [2]).advantages.tolist()
    assert of_right == pytest.approx([0.7071, 0.0, 0.0, 0.7071], abs=1e-4)
    assert of_wrong == pytest.approx([-0.7071, 0.0, 0.0, -0.7071], abs=1e-4)


def test_a_reference_that_the_method_drops_reaches_no_teacher(texts: TextCodec, pool: RewardPool) -> None:
    """With fallback neutral a right answer is of no use without a wrong one, and the other rollout said nothing."""
    expected_texts: dict[str, list[str | None]] = {"neutral": [None, None], "student": ["7", "7"]}
    for fallback, texts_of_correct in expected_texts.items():
        gathered = Gathered(texts, pool, "cepo", negative={"fallback": fallback})
        rows = [gathered.row(RIGHT), gathered.row(SILENT)]
        gathered.signal(rows, [1.0, 0.0], [2])
        assert gathered.texts_of("correct") == texts_of_correct
        assert gathered.texts_of("wrong") == [None, None]


def test_a_penalty_makes_rows_of_equal_rewards_learn(texts: TextCodec, pool: RewardPool) -> None:
    """Two wrong rollouts have no advantage over each other; a penalty that differs between them gives them one."""
    gathered = Gathered(texts, pool, "cepo")
    rows = [gathered.row(WRONG), gathered.row(OTHER)]
    gathered.signal(rows, [0.0, 0.0], [2])
    assert gathered.live.tolist() == [False, False]
    penalties = torch.zeros(2, max(len(row.own) for row in rows))
    penalties[0, 0] = 0.1
    gathered.signal(rows, [0.0, 0.0], [2], penalties=penalties)
    assert gathered.live.tolist() == [True, True]


def test_an_answer_that_a_tool_states_is_not_the_rollouts(texts: TextCodec, pool: RewardPool) -> None:
    r"""Of `it is \boxed{4} so \boxed{5}` a tool wrote the second half: the policy's answer is 4."""
    gathered = Gathered(texts, pool, "cepo")
    wrong = gathered.row(WRONG)
    result = gathered.row(r" so \boxed{5}")
    transcript = wrong._replace(
        response_ids=wrong.response_ids + result.response_ids,
        own=wrong.own + [False] * len(result.own),
    )
    gathered.signal([gathered.row(RIGHT), transcript], [1.0, 0.0], [2])
    assert [rollout.answer for rollout in gathered.groups[0].rollouts] == ["7", "4"]
    assert gathered.texts_of("wrong") == ["4", "4"]
