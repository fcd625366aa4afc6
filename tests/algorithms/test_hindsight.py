"""The baseline of evidence: its gradient is the policy gradient, summed over every group of a small tabular policy."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from factories import advantages_of, group, response_mask, rollout, same_bits, signal_of, token_batch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cepo.algorithms import build_estimator
from cepo.algorithms.statistics import pass_rate_of_others
from cepo.types import TokenBatch

WIDTH = 3
LONGEST = 3
SIZE = 3
END = 0
EXACT = {"rtol": 0.0, "atol": 1e-10}


def responses() -> list[tuple[int, ...]]:
    """All responses over 3 tokens: those that end by themselves, and those that are cut after 3 tokens."""
    words = range(1, WIDTH)
    ended: list[tuple[int, ...]] = []
    for length in range(LONGEST):
        for beginning in itertools.product(words, repeat=length):
            ended.append((*beginning, END))
    cut = itertools.product(words, repeat=LONGEST)
    return [*ended, *cut]


def numbered_prefixes(responses: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """What stands before any token of any response, each with its row in a policy's table."""
    prefixes: set[tuple[int, ...]] = set()
    for response in responses:
        for place in range(len(response)):
            prefixes.add(response[:place])
    return {prefix: row for row, prefix in enumerate(sorted(prefixes))}


RESPONSES = responses()
PREFIXES = numbered_prefixes(RESPONSES)
MASK = response_mask([len(response) for response in RESPONSES])
# Right is what contains token 1 at an even place, whether it is cut or not.
RIGHT = torch.tensor([float(1 in response[::2]) for response in RESPONSES], dtype=torch.float64)
ANSWERS = torch.tensor([response[-1] for response in RESPONSES])


def tables(seed: int, number: int = 1) -> Tensor:
    """(number, prefixes, 3): logits of the next token."""
    generator = torch.Generator().manual_seed(seed)
    return 1.5 * torch.randn(number, len(PREFIXES), WIDTH, generator=generator, dtype=torch.float64)


def token_log_probs(logits: Tensor) -> Tensor:
    """(responses, 3) of each response's tokens, 0 behind its end."""
    table = logits.log_softmax(dim=-1)
    rows: list[Tensor] = []
    for response in RESPONSES:
        prefixes = [PREFIXES[response[:place]] for place in range(len(response))]
        rows.append(table[prefixes, response])
    return pad_sequence(rows, batch_first=True)


GROUPS = torch.tensor(list(itertools.product(range(len(RESPONSES)), repeat=SIZE)))
PICKED = GROUPS.flatten()
POLICY = tables(8)[0]
OTHER = tables(2)[0]


def batch_of_groups(rewards: Tensor, correct: Tensor) -> TokenBatch:
    """All groups of 3 responses at once: `rewards` by response, the log-probs of the teacher by row."""
    num_rows = len(PICKED)
    token_rewards = torch.zeros(num_rows, LONGEST, dtype=torch.float64)
    token_rewards[:, 0] = rewards[PICKED]
    return TokenBatch(
        token_level_rewards=token_rewards,
        response_mask=MASK[PICKED],
        old_log_probs=token_log_probs(POLICY)[PICKED],
        group_ids=torch.arange(len(GROUPS)).repeat_interleave(SIZE),
        teacher_log_probs={"correct": correct},
        correct=RIGHT[PICKED] == 1.0,
        has_reference={"correct": torch.ones(num_rows, dtype=torch.bool)},
    )


def expected_gradient(rewards: Tensor, correct: Tensor, **advantage: object) -> Tensor:
    """E over groups of `mean_i sum_t A_it grad log P(y_it)`, by the chance of every group."""
    batch = batch_of_groups(rewards, correct)
    advantages = signal_of("hindsight", batch, advantage=advantage).advantages
    logits = POLICY.clone().requires_grad_()
    log_probs = token_log_probs(logits)
    response_chances = log_probs.detach().sum(dim=1)
    group_chances = response_chances[GROUPS].sum(dim=1).exp()
    row_chances = (group_chances / SIZE).repeat_interleave(SIZE)
    weight = row_chances.unsqueeze(1) * advantages
    (weight * log_probs[PICKED]).sum().backward()
    assert logits.grad is not None
    return logits.grad


def exact_gradient(rewards: Tensor) -> Tensor:
    """The gradient of the expected reward, `sum_y P(y) R(y)`."""
    logits = POLICY.clone().requires_grad_()
    (token_log_probs(logits).sum(dim=1).exp() * rewards).sum().backward()
    assert logits.grad is not None
    return logits.grad


def teacher_of(table: Tensor) -> Tensor:
    """(rows, 3): the log-probs of a teacher that is a policy of its own."""
    return token_log_probs(table)[PICKED]


def pass_rate(rewards: Tensor) -> float:
    return float((token_log_probs(POLICY).sum(dim=1).exp() * rewards).sum())


@pytest.mark.parametrize("seed", [2, 3])
def test_the_expected_gradient_is_the_exact_policy_gradient(seed: int) -> None:
    """3,375 groups of 3 of the 15 responses; any teacher will do, here a random one."""
    assert 0.1 < pass_rate(RIGHT) < 0.9
    gradient = expected_gradient(RIGHT, teacher_of(tables(seed)[0]), scale="none")
    torch.testing.assert_close(gradient, exact_gradient(RIGHT), **EXACT)


def test_the_scale_multiplies_it_by_the_mean_of_1_over_sigma() -> None:
    """The others' successes are binomial; with s of 2, p = (s + 1/2) / 3 and sigma^2 = p (1 - p) 3 / 2."""
    chance = pass_rate(RIGHT)
    likely = [(1 - chance) ** 2, 2 * chance * (1 - chance), chance**2]
    factor = 0.0
    for successes in range(3):
        rate = (successes + 0.5) / 3
        sigma = math.sqrt(rate * (1 - rate) * 3 / 2)
        factor += likely[successes] / sigma
    gradient = expected_gradient(RIGHT, teacher_of(OTHER))
    torch.testing.assert_close(gradient, factor * exact_gradient(RIGHT), **EXACT)


def test_rewards_between_and_beyond_the_ends_stay_unbiased() -> None:
    """Rewards are -1, 1, or -1.3 for a cut response; the baseline counts the last as wrong."""
    is_cut = MASK.sum(dim=1) == LONGEST
    rewards = 2 * RIGHT - 1 - 0.3 * is_cut * (RIGHT == 0)
    gradient = expected_gradient(rewards, teacher_of(OTHER), scale="none", reward_low=-1.0)
    torch.testing.assert_close(gradient, exact_gradient(rewards), **EXACT)


def shown_answers(owner: int) -> Tensor:
    """(rows, 3): the log-probs of a teacher that reads the answer of the rollout `owner` places further in the group."""
    by_answer = torch.stack([token_log_probs(table) for table in tables(4, WIDTH)])
    owners = GROUPS.roll(-owner, dims=1).flatten()
    return by_answer[ANSWERS[owners], PICKED]


def test_a_peers_answer_leaves_it_unbiased_and_the_own_does_not() -> None:
    """The own answer, the response's last token, tells the baseline what comes after the prefix."""
    exact = exact_gradient(RIGHT)
    by_peer = expected_gradient(RIGHT, shown_answers(owner=1), scale="none")
    torch.testing.assert_close(by_peer, exact, **EXACT)
    by_itself = expected_gradient(RIGHT, shown_answers(owner=0), scale="none")
    assert float((by_itself - exact).norm() / exact.norm()) > 0.05


def test_a_weight_of_states_keeps_each_states_direction() -> None:
    """It reads the prefix alone: the baseline's part of the gradient stays 0, and the rewards' part is reweighted."""
    weighted = {"scale": "none", "state_weight": "uncertainty"}
    of_equal_rewards = expected_gradient(torch.ones_like(RIGHT), teacher_of(OTHER), **weighted)
    assert float(of_equal_rewards.abs().max()) < 1e-10
    gradient = expected_gradient(RIGHT, teacher_of(OTHER), **weighted)
    assert float((gradient - exact_gradient(RIGHT)).norm()) > 1e-3


@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_a_weight_of_states_is_1_without_evidence(lam: float) -> None:
    """Bit for bit: the teacher's log-probs are the student's."""
    silent = torch.zeros(2, 2, dtype=torch.float64)
    batch = token_batch([1.0, 0.0], [0, 0], lengths=[2, 2], old=silent, views={"correct": silent}, dtype=torch.float64)
    settings = {"lam": lam, "scale": "none"}
    weighted = advantages_of("hindsight", batch, advantage={**settings, "state_weight": "uncertainty"})
    assert same_bits(weighted, advantages_of("hindsight", batch, advantage=settings))


@pytest.mark.parametrize("name", ["hindsight", "cepo", "rlsd"])
def test_no_rollouts_own_response_is_its_right_reference(name: str) -> None:
    prompt_group = group(
        rollout(0, 1.0, "70", correct=True),
        rollout(1, 1.0, "70.0", correct=True),
        rollout(2, 0.0, "3"),
    )
    settings = {} if name == "hindsight" else {"advantage": {"baseline": "hindsight"}}
    for source in ("peer_answer", "peer_full"):
        estimator = build_estimator(name, {"positive": {"source": source}, **settings})
        references = estimator.references(prompt_group)["correct"]
        assert [reference and reference.source_index for reference in references] == [1, 0, 0]


def test_the_baseline_goes_on_when_lambda_is_0() -> None:
    """Then the wrong side, which only the weight reads, is not asked any more."""
    prompt_group = group(rollout(0, 1.0, "70", correct=True), rollout(1, 0.0, "3"))
    estimator = build_estimator("cepo", {"advantage": {"baseline": "hindsight"}})
    at_step_24 = estimator.references(dataclasses.replace(prompt_group, step=24))
    at_step_25 = estimator.references(dataclasses.replace(prompt_group, step=25))
    assert all(at_step_24["correct"] + at_step_24["wrong"] + at_step_25["correct"])
    assert at_step_25["wrong"] == [None, None]
    assert estimator.needs_teacher(step=24)
    assert estimator.needs_teacher(step=25)


@pytest.mark.parametrize("name", ["cepo", "rlsd"])
def test_every_rollout_learns_since_no_reward_is_certain(name: str) -> None:
    """Of groups of equal rewards; without the baseline they teach nothing."""
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0])
    ids = torch.tensor([0, 0, 1, 1])
    over_baseline = build_estimator(name, {"advantage": {"baseline": "hindsight"}})
    assert over_baseline.live_rows(rewards, ids, {}).all()
    assert build_estimator("hindsight").live_rows(rewards, ids, {}).all()
    assert not build_estimator(name).live_rows(rewards, ids, {}).any()


def test_rewards_outside_the_range_count_as_its_ends() -> None:
    """Of 2, -1 and 0.5 the shares of a right response are 1, 0 and 0.5: `(sum of the others + 1/2) / 3`."""
    rewards = torch.tensor([2.0, -1.0, 0.5])
    group_ids = torch.zeros(3, dtype=torch.int64)
    prior, size = pass_rate_of_others(rewards, group_ids)
    assert prior.tolist() == pytest.approx([1 / 3, 2 / 3, 1 / 2])
    assert size.tolist() == [3, 3, 3]
    scaled, _ = pass_rate_of_others(10 * rewards - 3, group_ids, low=-3.0, high=7.0)
    assert scaled.tolist() == pytest.approx(prior.tolist())
