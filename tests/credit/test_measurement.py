"""A measurement of credit: its tokens and prefixes, its metrics by plain counting, what teachers know, damaged folders.

Metrics are corrected for the truth's noise, on a truth that is known. Of responses, the exact posterior reaches the limit of
what a teacher can know, and no other teacher exceeds it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import factories
import numpy
import pytest
import torch
from numpy.typing import NDArray

from cepo.config import load_config
from cepo.credit import agreement
from cepo.credit.agreement import QUARTERS, known
from cepo.credit.truth import (
    CONTINUATIONS_FILE,
    SETTINGS_FILE,
    Continuations,
    Truth,
    chosen_tokens,
    claim_folder,
    kept_rollouts,
    needed_prefixes,
    prefix_of,
)
from cepo.data.batch import ScoringRow, token_array
from cepo.data.prompts import Problem
from cepo.errors import ConfigError, DataError
from cepo.models.interface import EncodedPrompt, ImageInputs
from cepo.trainer.rollouts import Rollouts

Numbers = NDArray[numpy.float64]


def truth_of(value: Numbers, credit: Numbers, halves: Numbers | None = None, *, tokens: int) -> Truth:
    """Responses of `tokens` tokens, two of each problem."""
    row = numpy.arange(len(credit)) // tokens
    noiseless = numpy.array([credit, credit])
    return Truth(
        problem=row // 2,
        row=row,
        token=numpy.arange(len(credit)) % tokens,
        value=value,
        credit=credit,
        value_halves=numpy.array([value, value]),
        credit_halves=noiseless if halves is None else halves,
        entropy=numpy.zeros(len(credit)),
    )


def rollouts_of(rewards: Sequence[float], responses: Sequence[tuple[int, ...]], *, group_size: int = 2) -> Rollouts:
    """Rollouts of so many responses to each problem, right where the reward is positive."""
    problems: list[Problem] = []
    for number in range(len(responses) // group_size):
        problem = Problem(prompt_id=f"p{number}", text="", images=(), ground_truth="", solution=None, columns={})
        problems.append(problem)
    correct = torch.tensor(rewards) > 0
    return factories.rollouts_of(responses, rewards, problems=problems, prompts=[], correct=correct)


def values_of(figures: dict[str, agreement.Figure]) -> dict[str, float | None]:
    return {name: figure["value"] for name, figure in figures.items()}


def test_equal_tokens_before_other_images_are_scored_separately() -> None:
    """A teacher that sees the masked image reads the student's tokens."""

    def content(brightness: float) -> Any:
        images = ImageInputs(tensors={"pixel_values": torch.full((1, 4), brightness)})
        context = EncodedPrompt(token_ids=(1, 2), engine_ids=(1, 2), images=images)
        row = ScoringRow(context=context, response_ids=token_array([3]), row=0)
        return agreement._content_of(row)

    assert content(1.0) == content(1.0)
    assert content(0.0) != content(1.0)


def test_correlations_are_numpys() -> None:
    generator = numpy.random.default_rng(0)
    first = generator.normal(size=50)
    second = generator.normal(size=50)
    assert agreement.pearson(first, second) == pytest.approx(numpy.corrcoef(first, second)[0, 1], abs=1e-12)
    assert numpy.isnan(agreement.pearson(numpy.ones(5), first[:5]))


def test_the_area_under_the_curve_counts_pairs() -> None:
    """Of 40 values on a grid of 8, many pairs are ties, which count half."""
    generator = numpy.random.default_rng(1)
    numbers = generator.integers(0, 8, 40).astype(float)
    positive = generator.random(40) < 0.3
    pairs: list[float] = []
    for high in numbers[positive]:
        for low in numbers[~positive]:
            pairs.append((high > low) + 0.5 * (high == low))
    area = agreement.area_under_curve(numbers, positive)
    assert area == pytest.approx(numpy.mean(pairs), abs=1e-12)
    nothing_positive = numpy.zeros(40, dtype=bool)
    assert numpy.isnan(agreement.area_under_curve(numbers, nothing_positive))


def test_decisive_tokens_of_two_responses_by_hand() -> None:
    """Only A* of -0.5 and 0.3 decide.

    First response, |credit| 1, 4, 1: the decisive second token is above both others. Second response, |credit| 2, 2, 2:
    1/2 of the pairs. Of |credit| 12 the two have 4 + 2.
    """
    true_credit = numpy.array([0.1, -0.5, 0.0, 0.3, 0.1, 0.0])
    assigned = numpy.array([1.0, -4.0, 1.0, -2.0, 2.0, 2.0])
    truth = truth_of(numpy.zeros(6), true_credit, tokens=3)
    figures = values_of(agreement.credit_figures(truth, assigned, seed=0))
    assert figures["auroc"] == pytest.approx((1.0 + 0.5) / 2)
    assert figures["share_on_decisive"] == pytest.approx(6 / 12)


def test_the_correction_recovers_a_known_correlation() -> None:
    """The credit has correlation 0.6 with the noiseless truth, whose noise is as large as itself: 0.6 / sqrt(2) = 0.42."""
    generator = numpy.random.default_rng(2)
    size = 40_000
    noiseless = generator.normal(size=size)
    credit = 0.6 * noiseless + 0.8 * generator.normal(size=size)
    halves = noiseless + generator.normal(scale=numpy.sqrt(2.0), size=(2, size))
    truth = truth_of(numpy.zeros(size), halves.mean(axis=0), halves, tokens=size)
    figures = values_of(agreement.credit_figures(truth, credit, seed=0))
    assert figures["pearson"] == pytest.approx(0.6 / numpy.sqrt(2.0), abs=0.015)
    assert figures["pearson_corrected"] == pytest.approx(0.6, abs=0.02)


def test_halves_without_agreement_give_no_correction() -> None:
    credit = numpy.array([1.0, -1.0, 1.0, -1.0])
    opposed = numpy.array([credit, -credit])
    assert numpy.isnan(agreement.noise_corrected(numpy.array([0.0, 1.0, 2.0, 3.0]), credit, opposed))


def test_contrast_to_noise_by_hand() -> None:
    """A* of -0.5 and 0.3 decide; their |delta| of 3 and 1 have the median 2.

    Of the others, two had an alternative (P of 0.5), with |delta| of 0.2 and 0.4: noise 0.3 / 0.6745 = 0.445. The other
    two, of P 0.99, would make it 0.1 / 0.6745. The ratio is 2 / 0.445 = 4.50.
    """
    credit = numpy.array([0.1, -0.5, 0.0, 0.3, 0.1, 0.0])
    delta = numpy.array([0.2, 3.0, 0.0, -1.0, -0.4, 0.0])
    log_probs = numpy.log([0.5, 0.5, 0.99, 0.99, 0.5, 0.99])
    truth = truth_of(numpy.zeros(6), credit, tokens=3)
    figures = values_of(agreement.contrast_figures(truth, delta, log_probs, seed=0))
    assert figures["decisive"] == pytest.approx(2.0)
    assert figures["noise"] == pytest.approx(0.3 / 0.6745)
    assert figures["ratio"] == pytest.approx(2.0 * 0.6745 / 0.3)


@pytest.mark.parametrize(("credit", "delta"), [([0.0, 0.1], [1.0, 1.0]), ([0.5, 0.1], [1.0, 0.0])])
def test_no_decisive_token_or_no_noise_gives_no_ratio(credit: list[float], delta: list[float]) -> None:
    truth = truth_of(numpy.zeros(2), numpy.array(credit), tokens=2)
    log_probs = numpy.log([0.5, 0.5])
    figures = values_of(agreement.contrast_figures(truth, numpy.array(delta), log_probs, seed=0))
    assert figures["ratio"] is None


def test_errors_are_those_of_problems_and_not_of_tokens() -> None:
    """Tokens of a problem share their value, so that 400 tokens are 50 independent numbers: sd / sqrt(50)."""
    generator = numpy.random.default_rng(3)
    shared = generator.normal(size=50)
    truth = truth_of(numpy.zeros(400), numpy.zeros(400), tokens=4)
    numbers = shared[truth.problem]

    def mean_of(tokens: NDArray[Any]) -> dict[str, float]:
        return {"mean": float(numbers[tokens].mean())}

    figure = agreement.bootstrap(truth.problem, mean_of, seed=[0, 3])["mean"]
    mean = shared.mean()
    error = shared.std(ddof=1) / numpy.sqrt(50)
    assert figure["value"] == pytest.approx(mean)
    assert figure["error"] == pytest.approx(error, rel=0.1)
    assert figure["low"] == pytest.approx(mean - 1.96 * error, abs=0.2 * error)
    assert figure["high"] == pytest.approx(mean + 1.96 * error, abs=0.2 * error)


def test_a_single_problem_gives_figures_without_errors() -> None:
    truth = truth_of(numpy.zeros(4), numpy.array([0.5, -0.5, 0.1, 0.0]), tokens=2)
    pearson = agreement.credit_figures(truth, truth.credit, seed=0)["pearson"]
    assert pearson["value"] == pytest.approx(1.0)
    assert pearson["error"] is None
    assert pearson["low"] is None
    assert pearson["high"] is None


LENGTH = 8
ONE = torch.linspace(0.2, 0.9, LENGTH, dtype=torch.float64)
"""The policy: token t is 1 with this probability, whatever came before."""


def is_right(response: tuple[int, ...]) -> bool:
    return sum(response[:4]) % 2 == 0 and response[7] == 1


def token_chance(place: int, token: int) -> float:
    chance_of_one = float(ONE[place])
    return chance_of_one if token == 1 else 1 - chance_of_one


@cache
def value(prefix: tuple[int, ...]) -> float:
    """P(right | prefix), by both tokens that may follow."""
    if len(prefix) == LENGTH:
        return float(is_right(prefix))
    place = len(prefix)
    of_zero = token_chance(place, 0) * value((*prefix, 0))
    of_one = token_chance(place, 1) * value((*prefix, 1))
    return of_zero + of_one


Teacher = Callable[[tuple[int, ...]], float]
"""The unnormalised weight of a response's beginning; with the policy's chances it is a teacher's next token."""


def gain(teacher: Teacher, prefix: tuple[int, ...], token: int) -> float:
    """log P_teacher - log P of a token after a prefix; a wrong response may be impossible."""
    place = len(prefix)
    of_zero = token_chance(place, 0) * teacher((*prefix, 0))
    of_one = token_chance(place, 1) * teacher((*prefix, 1))
    ratio = teacher((*prefix, token)) / max(of_zero + of_one, 1e-12)
    return math.log(max(ratio, 1e-12))


@pytest.fixture(scope="module")
def rollouts() -> Rollouts:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(400, LENGTH, generator=generator, dtype=torch.float64)
    responses = [tuple(row) for row in (numbers < ONE).int().tolist()]
    rewards = [float(is_right(response)) for response in responses]
    return rollouts_of(rewards, responses, group_size=100)


def measure(rollouts: Rollouts, teacher: Teacher) -> dict[str, Any]:
    rows: list[list[float]] = []
    for generation in rollouts.generations:
        response = tuple(generation.response_ids.tolist())
        rows.append([gain(teacher, response[:place], token) for place, token in enumerate(response)])
    gains = torch.tensor(rows, dtype=torch.float64)
    figures = known(gains, rollouts, range(len(rows)), seed=0)
    assert figures.pop("responses") == rollouts.correct.sum()
    for figure in figures.values():
        assert figure["low"] <= figure["value"] <= figure["high"]
    return values_of(figures)


def test_the_posterior_knows_minus_log_p(rollouts: Rollouts) -> None:
    """For each right response the log ratios of P(y | right) add up to -log p."""
    figures = measure(rollouts, value)
    assert figures["nats"] == pytest.approx(-math.log(value(())), abs=1e-9)
    assert figures["limit"] == pytest.approx(-math.log(value(())), abs=0.1)
    assert sum(figures[quarter] for quarter in QUARTERS) == pytest.approx(figures["nats"])
    assert figures["third"] == pytest.approx(0.0, abs=1e-12), "tokens 4 and 5 decide nothing"


@pytest.mark.parametrize("trust", [0.0, 0.5, 2.0, -1.0])
def test_other_teachers_know_less(rollouts: Rollouts, trust: float) -> None:
    """Of the weights V^trust only trust 1 is the posterior; 0 is the student, and -1 believes the opposite."""

    def teacher(beginning: tuple[int, ...]) -> float:
        return max(value(beginning), 1e-3) ** trust

    figures = measure(rollouts, teacher)
    assert figures["nats"] < figures["limit"]
    assert (figures["nats"] > 0) == (trust > 0)
    assert (figures["wrong"] < 0) == (trust > 0), "what announces right responses tells against wrong ones"


def test_without_a_wrong_response_its_figure_is_undefined(rollouts: Rollouts) -> None:
    right_rows = rollouts.correct.nonzero().flatten().tolist()
    figures = known(torch.zeros(len(rollouts.correct), LENGTH), rollouts, right_rows, seed=0)
    assert figures["wrong"]["value"] is None
    assert figures["nats"]["value"] == 0.0


def chosen_of(rollouts: Rollouts, *, responses: int = 9, tokens: int = 9, seed: int = 0) -> dict[int, list[int]]:
    return chosen_tokens(rollouts, num_responses=responses, num_tokens=tokens, seed=seed)


def test_only_groups_with_differing_rewards_are_measured() -> None:
    """Of three problems the second has equal rewards; rows 0, 1, 4 and 5 are left, of which the seed draws three."""
    responses = [(1, 2), (1, 3), (1, 2), (1, 2), (4, 5), (4, 6)]
    rollouts = rollouts_of([1, 0, 1, 1, 0, 1], responses)
    drawn: set[tuple[int, ...]] = set()
    for seed in range(30):
        rows = chosen_of(rollouts, responses=3, seed=seed)
        assert len(rows) == 3
        drawn.add(tuple(rows))
    assert set().union(*drawn) == {0, 1, 4, 5}
    assert len(drawn) > 1


def test_without_a_difference_nothing_can_be_measured() -> None:
    equal = rollouts_of([1] * 6, [(1,)] * 6)
    with pytest.raises(DataError, match="all 3 groups of 2 responses have equal rewards"):
        chosen_of(equal)


def test_shared_beginnings_are_continued_once() -> None:
    """Responses 7 8 9 and 7 8 5 share three of their prefixes: nothing, 7, and 7 8. Whole responses have a verdict."""
    rollouts = rollouts_of([1, 0, 1, 0], [(7, 8, 9), (7, 8, 5), (7,), (6,)])
    chosen = chosen_of(rollouts)
    assert chosen == {0: [0, 1, 2], 1: [0, 1, 2], 2: [0], 3: [0]}
    prefixes = needed_prefixes(rollouts, chosen)
    assert [prefix.prompt_id for prefix in prefixes] == ["p0", "p1", "p0", "p0"]
    assert [prefix.tokens for prefix in prefixes] == [(), (), (7,), (7, 8)]
    assert len({prefix.name for prefix in prefixes}) == 4
    of_first = prefix_of(rollouts, 0, 2)
    of_second = prefix_of(rollouts, 1, 2)
    assert of_first.name == of_second.name


def test_of_long_responses_both_sides_of_some_tokens_count() -> None:
    rollouts = rollouts_of([1, 0], [tuple(range(50)), (99,)])
    tokens = chosen_of(rollouts, tokens=5)[0]
    assert len(tokens) == 5
    assert tokens == sorted(tokens)
    lengths = {len(prefix.tokens) for prefix in needed_prefixes(rollouts, {0: tokens})}
    lengths_before = set(tokens)
    lengths_after = {token + 1 for token in tokens}
    assert lengths == (lengths_before | lengths_after) - {50}
    assert tokens != chosen_of(rollouts, tokens=5, seed=1)[0]


WHOLE = {"prefix": "0/3", "length": 3, "right": "0110", "entropy": 0.5, "num_tokens": 40}


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"null", b"\xff\xfe"])
def test_settings_that_cannot_be_read_are_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / SETTINGS_FILE).write_bytes(text)
    config = load_config(["config=configs/microgeo/base.yaml"])
    with pytest.raises(DataError, match=rf"{tmp_path}/{SETTINGS_FILE} is damaged, .*give a new folder \(--out\)"):
        claim_folder(tmp_path, {}, config)


@pytest.mark.parametrize(
    "change", [{"prefix": None}, {"right": None}, {"right": "01x0"}, {"entropy": "much"}, {"num_tokens": [4]}]
)
def test_continuations_that_cannot_be_read_are_named(tmp_path: Path, change: dict[str, Any]) -> None:
    row = WHOLE | change
    row = {key: value for key, value in row.items() if value is not None}
    (tmp_path / CONTINUATIONS_FILE).write_text(f"{json.dumps(WHOLE)}\n{json.dumps(row)}\n")
    nothing = cast("Any", None)  # reading asks no engine
    with pytest.raises(DataError, match=f"{CONTINUATIONS_FILE} is damaged"):
        Continuations(tmp_path, nothing, nothing, number=4)
    (tmp_path / CONTINUATIONS_FILE).write_text(f"{json.dumps(WHOLE)}\n")
    assert Continuations(tmp_path, nothing, nothing, number=4).done["0/3"].right == "0110"


@pytest.mark.parametrize("change", ["algorithm.correct_key=overall", "algorithm.correct_threshold=0.9"])
def test_verdicts_by_another_rule_are_not_mixed(tmp_path: Path, change: str) -> None:
    command = ["config=configs/microgeo/base.yaml"]
    claim_folder(tmp_path / "m", {}, load_config(command))
    claim_folder(tmp_path / "m", {}, load_config(command))
    with pytest.raises(ConfigError, match=f"other settings: {change.partition('=')[0]};"):
        claim_folder(tmp_path / "m", {}, load_config([*command, change]))


def test_weights_of_a_later_run_are_not_mixed(tmp_path: Path) -> None:
    """A run that is started anew writes its checkpoints where those of the earlier one were."""
    config = load_config(["config=configs/microgeo/base.yaml"])
    actor = tmp_path / "global_step_2" / "actor"
    actor.mkdir(parents=True)
    (actor / "weights").write_text("first")
    claim_folder(tmp_path / "m", {}, config, actor=actor)
    claim_folder(tmp_path / "m", {}, config, actor=actor)
    (actor / "weights").write_text("later")
    with pytest.raises(ConfigError, match=r"other settings: checkpoint_files\.weights;"):
        claim_folder(tmp_path / "m", {}, config, actor=actor)


@pytest.mark.parametrize("lines", [[], ["0"], ["0", "1"], ["0", "0", "0"]])
def test_responses_to_other_problems_are_refused(tmp_path: Path, lines: list[str]) -> None:
    """Two responses to problem 0 are measured. With another number, responses would count for other problems."""
    config = load_config(["config=configs/microgeo/base.yaml", "worker.rollout.n=2"])
    (tmp_path / "responses.jsonl").write_text("".join(f'{{"prompt_id": "{line}"}}\n' for line in lines))
    problem = Problem(prompt_id="0", text="", images=(), ground_truth="", solution=None, columns={})
    session = cast("Any", SimpleNamespace(config=config, problems_of=lambda step: [problem]))
    with pytest.raises(DataError, match=r"responses\.jsonl has not the responses .*--out"):
        kept_rollouts(tmp_path, session)
