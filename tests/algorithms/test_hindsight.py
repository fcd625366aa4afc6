"""The baseline of evidence: its gradient is the policy gradient, summed over every group of a small tabular policy."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from factories import group, log_probs_like, rollout, same_bits, token_batch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cepo.algorithms import build_estimator
from cepo.algorithms.statistics import pass_rate_of_others
from cepo.types import TokenBatch, TokenSignal

WIDTH = 3
LONGEST = 3
SIZE = 3
END = 0
LOG3 = math.log(3.0)
EXACT = {"rtol": 0.0, "atol": 1e-10}


def responses() -> list[tuple[int, ...]]:
    """All responses over 3 tokens: those that end by themselves, and those that are cut after 3 tokens."""
    ended = [(*words, END) for length in range(LONGEST) for words in itertools.product(range(1, WIDTH), repeat=length)]
    return ended + list(itertools.product(range(1, WIDTH), repeat=LONGEST))


RESPONSES = responses()
PREFIXES = {
    words: number for number, words in enumerate(sorted({one[:end] for one in RESPONSES for end in range(len(one))}))
}
MASK = torch.tensor([[token < len(one) for token in range(LONGEST)] for one in RESPONSES])
# Right is what contains token 1 at an even place, whether it is cut or not.
RIGHT = torch.tensor([float(1 in one[::2]) for one in RESPONSES], dtype=torch.float64)
ANSWERS = [one[-1] for one in RESPONSES]


def tables(seed: int, number: int = 1) -> Tensor:
    """(number, prefixes, 3): logits of the next token."""
    generator = torch.Generator().manual_seed(seed)
    return 1.5 * torch.randn(number, len(PREFIXES), WIDTH, generator=generator, dtype=torch.float64)


def token_log_probs(logits: Tensor) -> Tensor:
    """(responses, 3) of each response's tokens, 0 behind its end."""
    table = logits.log_softmax(dim=-1)
    rows = [torch.stack([table[PREFIXES[one[:place]], token] for place, token in enumerate(one)]) for one in RESPONSES]
    return pad_sequence(rows, batch_first=True)


GROUPS = torch.tensor(list(itertools.product(range(len(RESPONSES)), repeat=SIZE)))
POLICY = tables(8)[0]


def batch_of_groups(rewards: Tensor, old: Tensor, correct: Tensor, wrong: Tensor | None = None) -> TokenBatch:
    """All groups of 3 responses at once. `old` is by response; the teachers' log-probs are by response or by row."""
    picked = GROUPS.flatten()
    token_rewards = torch.zeros(len(picked), LONGEST, dtype=torch.float64)
    token_rewards[:, 0] = rewards[picked]
    views = {"correct": correct} if wrong is None else {"correct": correct, "wrong": wrong}
    return TokenBatch(
        token_level_rewards=token_rewards,
        response_mask=MASK[picked],
        old_log_probs=old[picked],
        group_ids=torch.arange(len(GROUPS)).repeat_interleave(SIZE),
        teacher_log_probs={name: view if len(view) == len(picked) else view[picked] for name, view in views.items()},
        correct=RIGHT[picked] == 1.0,
        has_reference={name: torch.ones(len(picked), dtype=torch.bool) for name in views},
    )


def expected_gradient(make: Callable[[Tensor], TokenBatch], name: str, settings: dict[str, object]) -> Tensor:
    """E over groups of `mean_i sum_t A_it grad log P(y_it)`, by the chance of every group."""
    logits = POLICY.clone().requires_grad_()
    log_probs = token_log_probs(logits)
    chances = log_probs.detach().sum(dim=1)[GROUPS].sum(dim=1).exp()
    batch = make(log_probs.detach())
    advantages = build_estimator(name, settings).signal(batch, step=0).advantages
    weight = (chances / SIZE).repeat_interleave(SIZE).unsqueeze(1) * advantages
    (weight * log_probs[GROUPS.flatten()]).sum().backward()
    assert logits.grad is not None
    return logits.grad


def exact_gradient(rewards: Tensor) -> Tensor:
    """The gradient of the expected reward, `sum_y P(y) R(y)`."""
    logits = POLICY.clone().requires_grad_()
    (token_log_probs(logits).sum(dim=1).exp() * rewards).sum().backward()
    assert logits.grad is not None
    return logits.grad


def with_teacher(rewards: Tensor, teacher: Tensor) -> Callable[[Tensor], TokenBatch]:
    return lambda old: batch_of_groups(rewards, old, token_log_probs(teacher))


def pass_rate(rewards: Tensor) -> float:
    return float((token_log_probs(POLICY).sum(dim=1).exp() * rewards).sum())


@pytest.mark.parametrize("seed", [2, 3])
def test_the_expected_gradient_is_the_exact_policy_gradient(seed: int) -> None:
    """3,375 groups of 3 of the 15 responses; any teacher will do, here a random one."""
    assert 0.1 < pass_rate(RIGHT) < 0.9
    gradient = expected_gradient(with_teacher(RIGHT, tables(seed)[0]), "hindsight", {"advantage": {"scale": "none"}})
    torch.testing.assert_close(gradient, exact_gradient(RIGHT), **EXACT)


def test_the_scale_multiplies_it_by_the_mean_of_1_over_sigma() -> None:
    """The others' successes are binomial; with s of 2, p = (s + 1/2) / 3 and sigma^2 = p (1 - p) 3 / 2."""
    chance = pass_rate(RIGHT)
    likely = [(1 - chance) ** 2, 2 * chance * (1 - chance), chance**2]
    rates = [(successes + 0.5) / 3 for successes in range(3)]
    factor = sum(one / math.sqrt(rate * (1 - rate) * 3 / 2) for one, rate in zip(likely, rates, strict=True))
    gradient = expected_gradient(with_teacher(RIGHT, tables(2)[0]), "hindsight", {})
    torch.testing.assert_close(gradient, factor * exact_gradient(RIGHT), **EXACT)


def test_rewards_between_and_beyond_the_ends_stay_unbiased() -> None:
    """Rewards are -1, 1, or -1.3 for a cut response; the baseline counts the last as wrong."""
    rewards = 2 * RIGHT - 1 - 0.3 * (MASK.sum(dim=1) == LONGEST) * (RIGHT == 0)
    settings = {"advantage": {"scale": "none", "reward_low": -1.0}}
    gradient = expected_gradient(with_teacher(rewards, tables(2)[0]), "hindsight", settings)
    torch.testing.assert_close(gradient, exact_gradient(rewards), **EXACT)


def shown_answers(owner: int) -> Tensor:
    """(rows, 3): the log-probs of a teacher that reads the answer of the rollout `owner` places further in the group."""
    by_answer = torch.stack([token_log_probs(table) for table in tables(4, WIDTH)])
    shown = torch.tensor(ANSWERS)[GROUPS.roll(-owner, dims=1)].flatten()
    return by_answer[shown, GROUPS.flatten()]


def test_a_peers_answer_leaves_it_unbiased_and_the_own_does_not() -> None:
    """The own answer, the response's last token, tells the baseline what comes after the prefix."""

    def gradient(owner: int) -> Tensor:
        shown = shown_answers(owner)
        return expected_gradient(
            lambda old: batch_of_groups(RIGHT, old, shown), "hindsight", {"advantage": {"scale": "none"}}
        )

    exact = exact_gradient(RIGHT)
    torch.testing.assert_close(gradient(owner=1), exact, **EXACT)
    assert float((gradient(owner=0) - exact).norm() / exact.norm()) > 0.05


def test_equal_teachers_leave_one_out_bit_for_bit() -> None:
    """`(R - p) / sigma` by loops; p = (others' successes + 1/2) / 4, and sigma^2 = p (1 - p) 4 / 3."""
    (old,) = log_probs_like((1, 8, 5), seed=3)
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    batch = token_batch(rewards, [0] * 4 + [1] * 4, lengths=[5, 3, 1, 4, 2, 5, 5, 1], old=old, views={"correct": old})
    advantages = build_estimator("hindsight").signal(batch, step=0).advantages
    for row, reward in enumerate(rewards):
        start = row // 4 * 4
        rate = (sum(rewards[start : start + 4]) - reward + 0.5) / 4
        expected = torch.tensor((reward - rate) / math.sqrt(rate * (1 - rate) * 4 / 3)).float().expand(5)
        assert same_bits(advantages[row], expected.where(batch.response_mask[row], 0.0))


def signal_of(rewards: Sequence[float], correct: Sequence[Sequence[float]], **advantage: object) -> TokenSignal:
    """Of one group of equally long rollouts, whose student's log-probs are 0."""
    teacher = torch.tensor(correct, dtype=torch.float64)
    batch = token_batch(
        rewards, [0] * len(rewards), lengths=[teacher.shape[1]] * len(rewards), old=torch.zeros_like(teacher),
        views={"correct": teacher}, dtype=torch.float64,
    )  # fmt: skip
    return build_estimator("hindsight", {"advantage": advantage}).signal(batch, step=0)


def test_a_value_is_the_priors_odds_times_what_the_tokens_say() -> None:
    """p = (1 + 1/2) / 4; after evidence of log 3 the odds 3 / 5 are 9 / 5, hence V = 9 / 14."""
    told = [LOG3, -LOG3, 7.0]
    signal = signal_of([0.0, 1.0, 0.0, 0.0], [told, *[[0.0] * 3] * 3], scale="none")
    expected = torch.tensor([3 / 8, 9 / 14, 3 / 8], dtype=torch.float64)
    torch.testing.assert_close(signal.diagnostics["value"][0], expected)
    torch.testing.assert_close(signal.advantages[0], -expected)
    assert signal.advantages[1].tolist() == [1 - 0.5 / 4] * 3


@pytest.mark.parametrize(
    ("settings", "told", "expected"),
    [
        ({}, 0.0, [[3.0, 2.0], [-3.0, -3.0]]),
        ({"lam": 0.0}, -2 * LOG3, [[1.0, 2.0], [-2.0, -1.0]]),
        ({"lam": 0.5}, -2 * LOG3, [[2.0, 2.0], [-2.5, -1.0]]),
    ],
)
@pytest.mark.parametrize(("scale", "sigma"), [("none", 1.0), ("std", math.sqrt(6.0))])
def test_values_stand_on_the_scale_of_the_rewards(
    settings: dict[str, object], told: float, expected: list[list[float]], scale: str, sigma: float
) -> None:
    """Rewards -1 to 3, so 3 and -1 are 1 and 0: p = 1/4 and 3/4, and with evidence of log 3 V is 1/2 after 1/4.

    `A = R - (-1 + 4 V)`: 3 - 0 and 3 - 1 for the first, -1 - 2 for the other; sigma is 4 sqrt(1/4 3/4 2) = sqrt(6).
    Below lambda 1 a token is credited with what it changes: the first has values 0, 1 and then its reward 3; the other,
    with evidence of -log 9, has 2, 0 and then -1.
    """
    settings = {"scale": scale, "reward_low": -1.0, "reward_high": 3.0, **settings}
    advantages = signal_of([3.0, -1.0], [[LOG3, 5.0], [told, 5.0]], **settings).advantages
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64) / sigma)


@pytest.mark.parametrize(("ddof", "expected"), [(0, math.sqrt(3.0)), (1, math.sqrt(1.5))])
def test_the_variance_is_divided_by_the_size_less_ddof(ddof: int, expected: float) -> None:
    """Without evidence A is 3/4 and -3/4 for p = 1/4 and 3/4; sigma^2 is 3/16 2 / (2 - ddof), 3/16 or 3/8."""
    advantages = signal_of([1.0, 0.0], [[0.0, 0.0]] * 2, scale="std", ddof=ddof).advantages
    assert advantages[:, 0].tolist() == pytest.approx([expected, -expected])


def test_below_lambda_1_outcomes_keep_the_scale_of_rewards() -> None:
    """Rewards 2 and 1 of 1 to 2 are right and wrong: the wrong one's 1 is above p = 3/4, but below 1 + p.

    V is 1/4 and 3/4, and after evidence of log 3 and -log 9 it is 1/2 and 1/4; on the scale of the rewards 1 is added.
    """
    settings = {"lam": 0.0, "scale": "none", "reward_low": 1.0, "reward_high": 2.0}
    advantages = signal_of([2.0, 1.0], [[LOG3, 5.0], [-2 * LOG3, 5.0]], **settings).advantages
    torch.testing.assert_close(advantages, torch.tensor([[0.25, 0.5], [-0.5, -0.25]], dtype=torch.float64))


def test_below_lambda_1_no_token_is_credited_against_its_reward() -> None:
    """Evidence log 3, then -log 9, for a right response and for a wrong one; p is 1/4 and 3/4."""
    advantages = signal_of([1.0, 0.0], [[LOG3, -2 * LOG3, 0.0]] * 2, lam=0.0, scale="none").advantages
    expected = torch.tensor([[1 / 4, 0.0, 9 / 10], [0.0, -0.4, -0.5]], dtype=torch.float64)
    torch.testing.assert_close(advantages, expected)


@pytest.mark.parametrize(
    ("lam", "plain"), [(1.0, [[3 / 4, 1 / 2], [-3 / 4, -9 / 10]]), (0.0, [[1 / 4, 1 / 2], [0.0, -9 / 10]])]
)
def test_uncertain_states_weigh_by_their_variance(lam: float, plain: list[list[float]]) -> None:
    """p is 1/4 and 3/4, and evidence of log 3 makes V 1/2 and 9/10.

    V (1 - V) / (p (1 - p)) is then 1 before it, and behind it (1/4) / (3/16) = 4/3 and (9/100) / (3/16) = 12/25. Without
    evidence it is 1, and the rest is as without the weight, bit for bit.
    """
    settings = {"lam": lam, "scale": "none", "state_weight": "uncertainty"}
    advantages = signal_of([1.0, 0.0], [[LOG3, 5.0]] * 2, **settings).advantages
    weight = torch.tensor([[1.0, 4 / 3], [1.0, 12 / 25]], dtype=torch.float64)
    torch.testing.assert_close(advantages, torch.tensor(plain, dtype=torch.float64) * weight)
    silent = [[0.0, 0.0]] * 2
    unweighted = signal_of([1.0, 0.0], silent, lam=lam, scale="none").advantages
    torch.testing.assert_close(signal_of([1.0, 0.0], silent, **settings).advantages, unweighted)


def test_a_weight_of_states_keeps_each_states_direction() -> None:
    """It reads the prefix alone: the baseline's part of the gradient stays 0, and the rewards' part is reweighted."""
    settings = {"advantage": {"scale": "none", "state_weight": "uncertainty"}}
    constant = torch.ones_like(RIGHT)

    def make(rewards: Tensor) -> Tensor:
        return expected_gradient(with_teacher(rewards, tables(2)[0]), "hindsight", settings)

    assert float(make(constant).abs().max()) < 1e-10
    assert float((make(RIGHT) - exact_gradient(RIGHT)).norm()) > 1e-3


def test_extreme_evidence_keeps_values_between_0_and_1() -> None:
    values = signal_of([1.0, 0.0], [[-1e4, 1e4, 0.0], [1e4, 1e4, 1e4]]).diagnostics["value"]
    assert values[0].tolist() == pytest.approx([0.25, 0.0, 0.25])
    assert values[1].tolist() == pytest.approx([0.75, 1.0, 1.0])


@pytest.mark.parametrize("name", ["hindsight", "cepo", "rlsd"])
def test_no_rollouts_own_response_is_its_right_reference(name: str) -> None:
    right = [rollout(index, 1.0, answer, correct=True) for index, answer in enumerate(("70", "70.0"))]
    prompt_group = group(*right, rollout(2, 0.0, "3"))
    settings = {} if name == "hindsight" else {"advantage": {"baseline": "hindsight"}}
    for source in ("peer_answer", "peer_full"):
        estimator = build_estimator(name, {"positive": {"source": source}, **settings})
        sources = [None if one is None else one.source_index for one in estimator.references(prompt_group)["correct"]]
        assert sources == [1, 0, 0]


@pytest.mark.parametrize("name", ["cepo", "rlsd"])
@pytest.mark.parametrize("step", [0, 10, 25])
def test_the_weight_scales_the_baselines_advantage_within_bounds(name: str, step: int) -> None:
    """`sign(A_hat_t) = sign(A_t)` and `|A_hat_t - A_t| <= lambda r |A_t|`; at step 25 lambda is 0 and A_hat_t = A_t."""
    old, correct, wrong = log_probs_like((3, 8, 6), seed=5, scale=1.0)
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    ids = [0] * 4 + [1] * 4
    lengths = [6, 4, 1, 5, 6, 6, 2, 3]
    batch = token_batch(rewards, ids, lengths=lengths, old=old, views={"correct": correct, "wrong": wrong})
    plain = build_estimator("hindsight").signal(batch, step=step).advantages
    signal = build_estimator(name, {"advantage": {"baseline": "hindsight"}}).signal(batch, step=step)
    assert torch.equal(signal.advantages.sign(), plain.sign())
    mixing = 0.5 * max(0.0, 1 - step / 25)
    assert ((signal.advantages - plain).abs() <= mixing * 0.5 * plain.abs() * (1 + 1e-5)).all()
    assert same_bits(signal.advantages, plain) == (step == 25)
    raw = (plain.sign() * signal.diagnostics["delta"]).exp()
    for recorded, expected in (("raw_weight", raw), ("weight", raw.clamp(0.5, 1.5))):
        torch.testing.assert_close(signal.diagnostics[recorded], expected.where(batch.response_mask, 0.0))


def test_each_tokens_own_sign_weights_its_advantage() -> None:
    """The baseline falls below the reward 0.25 and rises again, so that A changes its sign, and evidence its effect."""
    correct = torch.tensor([[-3.0, 2.5, 0.2, 0.5], [0.5, 0.5, 0.5, 0.5]])
    views = {"correct": correct, "wrong": torch.zeros(2, 4)}
    batch = token_batch([0.25, 1.0], [0, 0], lengths=[4, 4], old=torch.zeros(2, 4), views=views, dtype=torch.float64)
    plain = build_estimator("hindsight").signal(batch, step=0).advantages
    assert len(plain[0].sign().unique()) == 2
    weight = {"lambda_init": 0.5, "lambda_schedule": "constant", "clip_radius": 0.4}
    settings = {"advantage": {"baseline": "hindsight"}, "weight": weight}
    weighted = build_estimator("cepo", settings).signal(batch, step=0).advantages
    weight = (plain.sign() * correct.double()).exp().clamp(0.6, 1.4)
    torch.testing.assert_close(weighted, plain * (1 + 0.5 * (weight - 1)), rtol=0.0, atol=1e-12)


def test_the_baseline_goes_on_when_lambda_is_0() -> None:
    """Then the wrong side, which only the weight reads, is not asked any more."""
    prompt_group = group(rollout(0, 1.0, "70", correct=True), rollout(1, 0.0, "3"))
    estimator = build_estimator("cepo", {"advantage": {"baseline": "hindsight"}})
    for step, shown in ((24, True), (25, False)):
        assert estimator.needs_teacher(step=step)
        actual = estimator.references(dataclasses.replace(prompt_group, step=step))
        assert all(actual["correct"])
        assert [one is not None for one in actual["wrong"]] == [shown] * 2


@pytest.mark.parametrize("name", ["cepo", "rlsd"])
def test_every_rollout_learns_since_no_reward_is_certain(name: str) -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0])
    ids = torch.tensor([0, 0, 1, 1])
    cases = [(name, {}), (name, {"advantage": {"baseline": "hindsight"}}), ("hindsight", {})]
    live = [build_estimator(each, settings).live_rows(rewards, ids, {}).tolist() for each, settings in cases]
    assert live == [[False] * 4, [True] * 4, [True] * 4]


def test_rewards_outside_the_range_count_as_its_ends() -> None:
    """Of 2, -1 and 0.5 the shares of a right response are 1, 0 and 0.5: `(sum of the others + 1/2) / 3`."""
    rewards = torch.tensor([2.0, -1.0, 0.5])
    group_ids = torch.zeros(3, dtype=torch.int64)
    prior, size = pass_rate_of_others(rewards, group_ids)
    assert prior.tolist() == pytest.approx([1 / 3, 2 / 3, 1 / 2])
    assert size.tolist() == [3, 3, 3]
    scaled, _ = pass_rate_of_others(10 * rewards - 3, group_ids, low=-3.0, high=7.0)
    assert scaled.tolist() == pytest.approx(prior.tolist())


def test_scale_mean_divides_by_the_expected_reward_of_the_others() -> None:
    """Rewards 1 and 0 of two: p = 1/4 and 3/4. Equal teachers leave V at p, so A = (1 - 1/4) / (1/4) = 3, and -1."""
    old = torch.full((2, 2), -1.0)
    batch = token_batch([1.0, 0.0], [0, 0], lengths=[2, 2], old=old, views={"correct": old})
    advantages = build_estimator("hindsight", {"advantage": {"scale": "mean"}}).signal(batch, step=0).advantages
    assert advantages.tolist() == [[3.0, 3.0], [-1.0, -1.0]]
