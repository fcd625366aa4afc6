"""Says why a run does not learn: one rule a function, each with its figure, three responses, and one thing to try.

A rule returns None if its fault is absent or cannot be seen. `docs/look.md` has the runs that the bounds are from.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy

from cepo.report.responses import RecordedResponse, ResponseGroup, derived_metrics

NOTHING_FOUND = "Nothing found that keeps this run from learning."
MOST_CUT = 0.25
"""Largest share of cut responses; sound runs have less than 0.02, those with too short a limit more than 0.5."""
MOST_WITHOUT_ANSWER = 0.5
MOST_DEAD = 0.8
"""Largest share of groups with equal rewards; sound runs have up to 0.5, those that learn nothing more than 0.8."""
LEAST_DISTINCT = 0.25
"""Smallest share of different responses in a group; sound runs of the toy task have more than 0.4."""
MOST_LOOPING = 0.3
MOST_GAP = 0.1
"""In nats per token, between sampler and trainer; bf16 explains 0.02."""
LARGEST_CORRELATION = 0.9
"""Between reward and length, or a phrase, within groups; sound runs have less than 0.5."""
MOST_CLIPPED = 0.2
LEAST_ENTROPY_LEFT = 0.1
"""Smallest ratio of the entropy at the end to that at the start."""
LEAST_HEADROOM = 0.02
"""Of greedy accuracy over sampled accuracy; sound runs of the toy task have more than 0.1."""
_NEARLY_NONE = 0.05
_RISE = 0.1
_FALL = 0.02
_FEWEST_GROUPS = 8
_FEWEST_STEPS = 3
_ANSWER = re.compile(r"\\boxed|<answer>|####|[Aa]nswer(?: is)?:")
_STATED = re.compile(r"\\boxed\{[^{}]*\}|</answer>|####\s*\S|[Aa]nswer(?: is)?:\s*\S")
_LOOP = re.compile(r"(.{1,40}?)\1{7,}", re.DOTALL)
_EVIDENCE = 3
_ROUNDING = 1e-9
_SAMPLED = 2_000
_LONGEST_PHRASE = 3
_READ = 8_000
"""Characters at the end of a response in which phrases are looked for: with 130,000 a page took minutes."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A fault: its name, the figure that shows it, what to try, and responses that are evidence."""

    name: str
    figure: str
    advice: str
    evidence: Sequence[RecordedResponse] = ()

    def line(self) -> str:
        return f"{self.name}: {self.figure} Try: {self.advice}"


class Observed:
    """What is known of a run: recorded groups of responses, and metrics by the names of `docs/tracking.md` and step.

    `metrics` replace what the responses say, because a trainer may record only some of its responses.
    """

    def __init__(
        self, groups: Sequence[ResponseGroup], metrics: Mapping[str, Mapping[int, float]] | None = None
    ) -> None:
        self.groups = groups
        self.metrics: Mapping[str, Mapping[int, float]] = derived_metrics(groups) | dict(metrics or {})

    @cached_property
    def responses(self) -> list[RecordedResponse]:
        return [response for group in self.groups for response in group.responses]

    @cached_property
    def sample(self) -> Sequence[RecordedResponse]:
        """At most about 2,000 responses, evenly spread, for rules that read texts."""
        return self.responses[:: 1 + len(self.responses) // _SAMPLED]

    @cached_property
    def mixed(self) -> list[ResponseGroup]:
        return [group for group in self.groups if not group.is_dead]

    def values(self, name: str) -> list[float]:
        """Returns the values of a metric in the order of steps, without step 0."""
        by_step = self.metrics.get(name, {})
        is_of_validation = name.startswith("val/")
        return [by_step[step] for step in sorted(by_step) if step > 0 or is_of_validation]

    def mean(self, name: str) -> float | None:
        values = self.values(name)
        return statistics.fmean(values) if values else None

    def ends(self, name: str) -> tuple[float, float] | None:
        """Returns the means of the first and the last third of a metric; None if it has fewer than six values."""
        values = self.values(name)
        third = len(values) // 3
        if third < 2:
            return None
        return statistics.fmean(values[:third]), statistics.fmean(values[-third:])


def diagnosed(observed: Observed) -> list[Finding]:
    """Returns the faults of a run, the most basic first; empty if none is found."""
    return [finding for rule in RULES if (finding := rule(observed)) is not None]


def _some(responses: Iterable[RecordedResponse]) -> list[RecordedResponse]:
    return list(itertools.islice(responses, _EVIDENCE))


def _by_reward(responses: Iterable[RecordedResponse]) -> list[RecordedResponse]:
    return sorted(responses, key=lambda response: -response.reward)


def _highest_and_lowest(group: ResponseGroup) -> list[RecordedResponse]:
    ordered = _by_reward(group.responses)
    return [ordered[0], ordered[-1]]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def unended(observed: Observed) -> Finding | None:
    """Responses go on after their answer until the length limit cuts them."""
    share = observed.mean("response_length/clip_ratio")
    cut_responses = _cut(observed)
    answered = [response for response in cut_responses if _STATED.search(response.response)]
    if share is None or share < 1 - MOST_CUT or 2 * len(answered) <= len(cut_responses):
        return None
    return Finding(
        name="responses do not end",
        figure=f"{_percent(share)} of the responses reach the length limit, after they have stated an answer.",
        advice="the token that ends a turn: it must be among the sampler's end tokens, and be trained on.",
        evidence=answered[:_EVIDENCE],
    )


def truncation(observed: Observed) -> Finding | None:
    """Responses are cut by the length limit before they have answered."""
    share = observed.mean("response_length/clip_ratio")
    if share is None or share < MOST_CUT or unended(observed) is not None:
        return None
    return Finding(
        name="responses are cut",
        figure=f"{_percent(share)} of the responses reach the length limit, so they have no answer to reward.",
        advice="a higher limit for responses, or prompts that ask for shorter ones.",
        evidence=_cut(observed)[:_EVIDENCE],
    )


def _cut(observed: Observed) -> list[RecordedResponse]:
    """Returns responses that were cut, or if that is not recorded the longest ones."""
    cut = [response for response in observed.sample if response.finished is False]
    if cut:
        return cut
    longest_first = sorted(observed.sample, key=lambda response: -response.length)
    return longest_first[: max(1, len(longest_first) // 4)]


def answer_format(observed: Observed) -> Finding | None:
    """The grader finds no answer, though some responses may be right."""
    share = observed.mean("references/responses_without_answer")
    if share is None:
        with_format = [response for response in observed.sample if _ANSWER.search(response.prompt)]
        if 2 * len(with_format) <= len(observed.sample):
            return None
        share = sum(_ANSWER.search(response.response) is None for response in with_format) / len(with_format)
    if share < MOST_WITHOUT_ANSWER:
        return None
    without = (response for response in observed.sample if _ANSWER.search(response.response) is None)
    return Finding(
        name="answers are not found",
        figure=f"{_percent(share)} of the responses state no answer in the form that the prompt asks for.",
        advice="check the chat template and the prompt's instruction; a few steps of supervised training teach a form.",
        evidence=_some(without),
    )


def equal_rewards(observed: Observed) -> Finding | None:
    """All rewards of the run are the same number."""
    rewards = {response.reward for response in observed.responses}
    means = observed.values("reward/mean")
    if len(rewards) != 1 or len(observed.groups) < _FEWEST_GROUPS or max(means) - min(means) > 1e-9:
        return None
    reward = rewards.pop()
    return Finding(
        name="the reward is constant",
        figure=f"All {len(observed.responses):,} responses have the reward {reward:g}.",
        advice="call the reward function on the responses below by hand: does it read their answers, and the right column?",
        evidence=observed.responses[:_EVIDENCE],
    )


def looping(observed: Observed) -> Finding | None:
    """Responses repeat one phrase."""
    looping_responses = [response for response in observed.sample if _LOOP.search(response.response[-_READ:])]
    if not looping_responses or len(looping_responses) < MOST_LOOPING * len(observed.sample):
        return None
    share = len(looping_responses) / len(observed.sample)
    return Finding(
        name="responses repeat themselves",
        figure=f"{_percent(share)} of the responses repeat one phrase eight times or more.",
        advice="a lower learning rate, or an earlier checkpoint: the policy has broken down.",
        evidence=looping_responses[-_EVIDENCE:],
    )


def equal_responses(observed: Observed) -> Finding | None:
    """The responses of a group are the same text."""
    sized = [group for group in observed.groups if len(group.responses) >= 4]
    if len(sized) < _FEWEST_GROUPS:
        return None
    shares: list[float] = []
    for group in sized:
        texts = {response.response for response in group.responses}
        shares.append(len(texts) / len(group.responses))
    share = statistics.fmean(shares)
    if share >= LEAST_DISTINCT:
        return None
    return Finding(
        name="responses of a group are equal",
        figure=f"On average {_percent(share)} of a group's responses are different texts.",
        advice="a higher sampling temperature; top-k and top-p may also leave one choice.",
        evidence=sized[-1].responses[:_EVIDENCE],
    )


def dead_groups(observed: Observed) -> Finding | None:
    """Most groups have equal rewards, from which a group method learns nothing."""
    mixed = observed.mean("groups/mixed")
    if mixed is None or 1 - mixed < MOST_DEAD:
        return None
    all_right = observed.mean("groups/all_right") or 0.0
    all_wrong = observed.mean("groups/all_wrong") or 0.0
    figure = f"{_percent(1 - mixed)} of the groups have equal rewards"
    figure += f" ({_percent(all_right)} of all are right throughout, {_percent(all_wrong)} wrong)."
    advice = "more responses per prompt, or prompts of another difficulty: "
    advice += "easier ones, or a stronger model." if all_wrong >= all_right else "harder ones."
    dead = [group for group in observed.groups if group.is_dead]
    return Finding(
        name="groups have equal rewards",
        figure=figure,
        advice=advice,
        evidence=_some(group.responses[0] for group in dead[-_EVIDENCE:]),
    )


def learning_rate(observed: Observed) -> Finding | None:
    """The weights do not change."""
    rates = observed.values("actor/lr")
    norms = observed.values("actor/weight_norm")
    if len(rates) >= _FEWEST_STEPS and not any(rates):
        figure = f"The learning rate was 0 in all {len(rates)} steps."
    elif len(norms) >= _FEWEST_STEPS and max(norms) == min(norms):
        figure = f"The norm of the weights was {norms[0]:.9g} in all {len(norms)} steps."
    else:
        return None
    return Finding(
        name="the weights do not change",
        figure=figure,
        advice="a higher learning rate, and weights in fp32 for the optimizer: bf16 rounds small changes away.",
        evidence=observed.responses[-_EVIDENCE:],
    )


def sampler_gap(observed: Observed) -> Finding | None:
    """Sampler and trainer disagree on the probabilities of the same tokens."""
    gap = observed.mean("rollout/log_prob_gap_mean")
    if gap is None or gap < MOST_GAP:
        return None
    measured = [response for response in observed.responses if response.gap is not None]
    return Finding(
        name="sampler and trainer differ",
        figure=f"Their log-probs of the same tokens differ by {gap:.2g} nats on average; bf16 explains 0.02.",
        advice="compare temperature, top-p and chat template of both, and whether the sampler gets the new weights.",
        evidence=_some(sorted(measured, key=lambda response: -(response.gap or 0.0))),
    )


def _correlations(groups: Sequence[ResponseGroup], numbers: numpy.ndarray) -> numpy.ndarray:
    """Returns (K,), the correlations of the reward with K numbers of each response; 0 where one is undefined.

    Rewards and numbers, (R, K) in the order of the groups' responses, are taken less the means of their group.
    """
    rewards = numpy.array([response.reward for group in groups for response in group.responses])
    numbers = numbers.copy()
    start = 0
    for group in groups:
        end = start + len(group.responses)
        rewards[start:end] -= rewards[start:end].mean()
        numbers[start:end] -= numbers[start:end].mean(axis=0)
        start = end
    spread = numpy.linalg.norm(rewards) * numpy.linalg.norm(numbers, axis=0)
    spread[spread <= _ROUNDING] = numpy.inf
    return rewards @ numbers / spread


def length_as_reward(observed: Observed) -> Finding | None:
    """The reward of a response follows from its length."""
    if len(observed.mixed) < _FEWEST_GROUPS:
        return None
    lengths = [[float(len(response.response))] for group in observed.mixed for response in group.responses]
    correlation = float(_correlations(observed.mixed, numpy.array(lengths))[0])
    if abs(correlation) < LARGEST_CORRELATION:
        return None
    kind = "longer" if correlation > 0 else "shorter"
    return Finding(
        name="length explains the reward",
        figure=f"Within groups, reward and length have the correlation {correlation:.2f}: {kind} responses get more.",
        advice="take the length out of the reward, or bound it: the policy will write for it.",
        evidence=_highest_and_lowest(observed.mixed[-1]),
    )


def phrase_as_reward(observed: Observed) -> Finding | None:
    """The reward of a response follows from a phrase that it has or lacks."""
    groups = observed.mixed[-200:]
    if len(groups) < _FEWEST_GROUPS:
        return None
    of_responses: list[set[str]] = []
    in_groups = Counter[str]()
    for group in groups:
        of_group = [set(_phrases(response.response[-_READ:])) for response in group.responses]
        of_responses += of_group
        in_groups.update(set[str]().union(*of_group))
    common = (phrase for phrase, number in in_groups.items() if 2 * number > len(groups))
    phrases = sorted(common, key=lambda phrase: (len(phrase), phrase))  # of equal correlations the shortest is named
    if not phrases:
        return None
    has_phrase = numpy.zeros((len(of_responses), len(phrases)))  # (R, K)
    for row, of_response in enumerate(of_responses):
        has_phrase[row] = [phrase in of_response for phrase in phrases]
    correlations = _correlations(groups, has_phrase)
    place = int(numpy.abs(correlations).argmax())
    phrase, correlation = phrases[place], float(correlations[place])
    if abs(correlation) < LARGEST_CORRELATION:
        return None
    verb = "have" if correlation > 0 else "lack"
    return Finding(
        name="a phrase explains the reward",
        figure=f"Responses that {verb} “{phrase}” get more: within groups the correlation is {correlation:.2f}.",
        advice="read the reward function: the policy can earn the reward with this phrase alone.",
        evidence=_highest_and_lowest(observed.mixed[-1]),
    )


def _phrases(text: str) -> Iterator[str]:
    """Yields the words and signs of a text, and up to three of them in a row; numbers are left out."""
    words = re.findall(r"[^\W\d]+|[^\w\s]", text)
    for length in range(1, _LONGEST_PHRASE + 1):
        for start in range(len(words) - length + 1):
            yield " ".join(words[start : start + length])


def held_out(observed: Observed) -> Finding | None:
    """The training reward rises or holds, and the accuracy on held-out problems does not."""
    rewards = observed.ends("reward/mean")
    accuracies = observed.values("val/accuracy")
    if rewards is None or len(accuracies) < 2:
        return None
    rise = rewards[1] - rewards[0]
    change = accuracies[-1] - accuracies[0]
    rises_alone = rise >= _RISE and change <= _FALL
    holds_alone = rise >= -_FALL and change <= -_RISE
    if not (rises_alone or holds_alone):
        return None
    return Finding(
        name="held-out accuracy does not follow",
        figure=f"The training reward went from {rewards[0]:.2f} to {rewards[1]:.2f}, held-out accuracy from "
        f"{accuracies[0]:.2f} to {accuracies[-1]:.2f}.",
        advice="read the best-rewarded responses of the last steps: are they right? More or other problems, if they are.",
        evidence=_some(_by_reward(observed.responses[-200:])),
    )


def entropy(observed: Observed) -> Finding | None:
    """The policy has become certain, and explores no more."""
    ends = observed.ends("rollout/entropy")
    if ends is None or ends[0] <= 0 or ends[1] / ends[0] >= LEAST_ENTROPY_LEFT:
        return None
    return Finding(
        name="the entropy has collapsed",
        figure=f"It fell from {ends[0]:.3g} to {ends[1]:.3g} nats per token.",
        advice="a lower learning rate, a wider upper clip limit, or fewer steps.",
        evidence=observed.responses[-_EVIDENCE:],
    )


def clipping(observed: Observed) -> Finding | None:
    """Most of the update is clipped away."""
    lower = observed.mean("actor/pg_clipfrac_lower") or 0.0
    higher = observed.mean("actor/pg_clipfrac_higher") or 0.0
    if lower + higher < MOST_CLIPPED:
        return None
    return Finding(
        name="updates are clipped",
        figure=f"The ratio of probabilities is clipped at {_percent(lower + higher)} of the tokens.",
        advice="a lower learning rate, or fewer updates per batch of responses.",
        evidence=observed.responses[-_EVIDENCE:],
    )


def headroom(observed: Observed) -> Finding | None:
    """Sampled responses are as often right as greedy ones, so that a sharper policy gains nothing, and do not gain any more."""
    sampled = observed.values("val/accuracy")
    greedy = observed.values("val/greedy_accuracy")
    if len(sampled) < 2 or not greedy:
        return None
    has_room = not _NEARLY_NONE < sampled[-1] < 1 - _NEARLY_NONE or greedy[-1] - sampled[-1] > LEAST_HEADROOM
    if has_room or sampled[-1] - sampled[-2] > _FALL:
        return None
    return Finding(
        name="no headroom is left",
        figure=f"On held-out problems sampled responses are right in {_percent(sampled[-1])}, greedy ones in "
        f"{_percent(greedy[-1])}; at the validation before, sampled ones were in {_percent(sampled[-2])}.",
        advice="a higher sampling temperature, more responses per prompt, or problems that greedy responses miss.",
        evidence=_some(response for group in reversed(observed.mixed) for response in group.responses),
    )


RULES: Sequence[Callable[[Observed], Finding | None]] = (
    unended,
    looping,
    truncation,
    answer_format,
    equal_rewards,
    equal_responses,
    learning_rate,
    sampler_gap,
    length_as_reward,
    phrase_as_reward,
    dead_groups,
    held_out,
    entropy,
    clipping,
    headroom,
)
"""In the order in which faults are named: one that is the cause of others comes before them."""
