"""Scores recorded responses with a model by two teachers: the contrast of each token, as `cepo credit` measures it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from cepo.algorithms import Estimator, build_estimator, statistics
from cepo.config import RunConfig, load_config
from cepo.credit.agreement import FIRST_STEP, knowledge, signals_of
from cepo.credit.resources import Scoring
from cepo.data.images import load_rgb
from cepo.data.prompts import ContextBuilder, Problem
from cepo.errors import ConfigError, DataError
from cepo.models.processing import processing_of
from cepo.report.credit_view import beliefs_of
from cepo.report.html_page import Section
from cepo.report.response_pair import Contrast, clearest_pair, contrast_of
from cepo.report.responses import ResponseGroup
from cepo.report.shown_responses import CreditedResponse, data_uri, response_title
from cepo.rewards.pool import RewardPool
from cepo.rollout.generator import Generation
from cepo.run_folder.trace import GroupRecord
from cepo.terminal.progress import phase
from cepo.trainer.recording import group_records
from cepo.trainer.rollouts import Rollouts
from cepo.types import TokenBatch
from cepo.workers.actor import Actor
from cepo.workers.checkpoint import load_weights
from cepo.workers.named_checkpoint import config_of_checkpoint
from cepo.workers.worker import WorkerSpec, objective_settings

_METHOD = "cepo"
_TEACHERS = {"positive": {"source": "peer_answer"}, "negative": {"source": "peer_answer", "fallback": "neutral"}}
"""Each teacher reads the final answer of a right or of a wrong response of the group."""
_FEWEST_TOKENS = 20
_BELIEF_NOTE = (
    "The curve is the belief that the response is right: the share of right ones among the other responses, and after each "
    "token how much likelier the right answer makes it."
)
_SETTINGS = ("worker.reward.num_cpus=1", "data.max_prompt_length=8192")


@dataclass(frozen=True, kw_only=True)
class ContrastNoise:
    """The noise of the contrast, in nats, and the shares of tokens whose contrast exceeds it twice, for or against the outcome.

    Counted are tokens that had an alternative. Of normal noise alone, 2.3 % would be on either side.
    """

    nats: float
    for_outcome: float
    against_outcome: float


@dataclass(frozen=True, kw_only=True)
class ScoredGroups:
    """Groups with the contrast of each token.

    `known` is how many nats the teacher with the right answer knows of a right response (`cepo.credit.agreement.known`);
    None if it has read nothing.
    """

    groups: Sequence[GroupRecord]
    known: float | None
    noise: ContrastNoise | None


def scored_groups(groups: Sequence[ResponseGroup], model: str, *, responses: int) -> ScoredGroups:
    """Scores the last mixed groups, of the most frequent size, with about so many responses, by a model or a checkpoint.

    Raises `DataError`: no group has both a right and a wrong response.
    """
    chosen = chosen_groups(groups, responses=responses)
    longest = max(len(response.response) for group in chosen for response in group.responses)
    with opened(model, longest=longest) as session:
        return scored_by(session, chosen)


def chosen_groups(groups: Sequence[ResponseGroup], *, responses: int) -> list[ResponseGroup]:
    """Returns the last groups with right and wrong responses, of the most frequent size; raises `DataError` if there is none."""
    mixed = [group for group in groups if 0 < group.num_right < len(group.responses) and not group.is_dead]
    if not mixed:
        raise DataError("no group has both a right and a wrong response, so there is nothing to contrast")
    (size, _), *_ = Counter(len(group.responses) for group in mixed).most_common(1)
    of_size = [group for group in mixed if len(group.responses) == size]
    return of_size[-max(1, responses // size) :]


@contextlib.contextmanager
def opened(model: str, *, longest: int) -> Iterator[Scoring]:
    """Opens a model folder, a hub name or global_step_<N> of a run, in float32 on a processor."""
    actor_folder: Path | None = None
    settings = [*_SETTINGS, f"data.max_response_length={longest + 1}"]
    if not torch.cuda.is_available():
        settings += ["worker.actor.fsdp.mp_param_dtype=fp32"]
    if (Path(model) / "adapter_config.json").is_file():
        raise ConfigError(f"{model} is an adapter; merge it first: cepo merge {model} --base MODEL --out FOLDER")
    if Path(model).is_dir() and not (Path(model) / "config.json").is_file():
        config, actor_folder = config_of_checkpoint(model, settings)
    else:
        config = config_of_model(model, settings)
    method = build_estimator(_METHOD, _TEACHERS)
    processing = processing_of(config)
    spec = WorkerSpec.of(config, teacher=method.teacher, needs_values=False, total_steps=1, most_visuals=(1, 1))
    with phase("loading the model"):
        actor = Actor(
            spec.actor,
            processing,
            temperature=1.0,
            teacher=spec.teacher,
            objective_settings=objective_settings(spec.actor, spec.kl),
            with_reference=False,
            total_steps=1,
            seed=spec.seed,
        )
        if actor_folder is not None:
            load_weights(actor, actor_folder)
    with contextlib.closing(RewardPool(config.worker.reward)) as rewards:
        yield Scoring(config=config, processing=processing, rewards=rewards, backend=actor)


def config_of_model(model: str, settings: Sequence[str] = _SETTINGS) -> RunConfig:
    """Returns a configuration without data, which names a model."""
    sources = ["data.train_files=none", "data.val_files=null", "trainer.val_before_train=false"]
    return load_config([f"worker.actor.model.model_path={model}", *sources, *settings])


def scored_by(session: Scoring, groups: Sequence[ResponseGroup]) -> ScoredGroups:
    """Scores groups of one size with an opened model."""
    method = build_estimator(_METHOD, _TEACHERS)
    rollouts = _rollouts_of(groups, session, method)
    with phase(f"scoring {len(rollouts.generations)} responses by two teachers"):
        signal, *_ = signals_of(rollouts, {_METHOD: method}, session)
    in_order = group_records(signal.batch, signal.signal, session.processing, method.views, len(groups))
    records = [replace(record, step=group.step) for record, group in zip(in_order, groups, strict=True)]
    known: float | None = None
    for row in knowledge([signal], rollouts, seed=session.config.trainer.seed):
        if row["name"].endswith("correct") and known is None:
            known = row["nats"]["value"]
    return ScoredGroups(
        groups=records,
        known=known,
        noise=contrast_noise(signal.batch, signal.signal.diagnostics["delta"]),
    )


def _rollouts_of(groups: Sequence[ResponseGroup], session: Scoring, method: Estimator) -> Rollouts:
    """Returns recorded responses as a step's rollouts; their own end token is added to those that were not cut."""
    processing = session.processing
    contexts = ContextBuilder(processing, method.teacher, max_context_length=session.config.data.max_prompt_length)
    problems: list[Problem] = []
    for number, group in enumerate(groups):
        first = group.responses[0]
        images = [load_rgb(name, None) for name in first.images]  # whose paths `read_rollouts_of` has checked
        problems.append(
            Problem(
                prompt_id=f"{first.step}.{number}",
                text="<image>" * len(images) + first.prompt,
                images=tuple(images),
                ground_truth=first.ground_truth or "not recorded",
                solution=None,
                columns={},
            )
        )
    responses = [response for group in groups for response in group.responses]
    generations: list[Generation] = []
    for response in responses:
        ids = [*processing.encode_text(response.response)]
        if response.finished is not False:
            ids.append(processing.eos_token_ids[0])
        generations.append(Generation.of(ids, [0.0] * len(ids), finished=response.finished is not False))
    return Rollouts(
        step=FIRST_STEP,
        problems=problems,
        prompts=[contexts.student(problem) for problem in problems],
        generations=generations,
        responses=[response.response for response in responses],
        scores=[{"overall": response.reward} for response in responses],
        correct=torch.tensor([bool(response.right) for response in responses]),
    )


def contrast_noise(batch: TokenBatch, delta: Tensor) -> ContrastNoise | None:
    """Returns the noise of a contrast delta, (B, T), between the teachers `correct` and `wrong` of a batch.

    It is None if fewer than 20 tokens contradict the outcome.
    """
    alternative = statistics.had_alternative(batch.teacher_log_probs["correct"], batch.teacher_log_probs["wrong"])
    counted = alternative & batch.response_mask & batch.has_reference["correct"].unsqueeze(1)
    agreement = delta.where(batch.correct.unsqueeze(1), -delta)
    nats = statistics.contrast_noise(agreement, counted)
    of_tokens = agreement[counted]
    if int((of_tokens < 0).sum()) < _FEWEST_TOKENS:
        return None
    number = of_tokens.numel()
    return ContrastNoise(
        nats=nats,
        for_outcome=int((of_tokens > 2 * nats).sum()) / number,
        against_outcome=int((of_tokens < -2 * nats).sum()) / number,
    )


def contrast_sections(scored: ScoredGroups) -> list[Section]:
    """Returns the parts of a page with the clearest pair, and with all responses that were scored."""
    ranked = sorted(scored.groups, key=lambda group: clearest_pair(group.rollouts)[0], reverse=True)
    _, places = clearest_pair(ranked[0].rollouts)
    clearest = contrast_of(ranked[0], places, method=_METHOD, beliefs=beliefs_of(ranked[0]))
    note = (
        f"Blue is credit, orange blame: a token that the right answer of the group makes likelier than a wrong one. "
        f"The colours reach from {clearest.low:.2f} to {clearest.high:.2f} times {clearest.uniform}. "
        f"{_BELIEF_NOTE}"
    )
    responses: list[CreditedResponse] = []
    for group in ranked:
        places_of_group = range(len(group.rollouts))
        contrast = contrast_of(group, places_of_group, method=_METHOD, beliefs=beliefs_of(group))
        responses += _shown(contrast, group)
    return [
        Section(
            title="The clearest pair, token by token",
            notes=[clearest.sentence, note, gauge(scored)],
            responses=list(_shown(clearest, ranked[0])),
            closed=False,
        ),
        Section(title="All scored responses", responses=responses),
    ]


def gauge(scored: ScoredGroups) -> str:
    """Returns in a sentence what the teachers know of the responses."""
    if scored.known is None:
        return "The teachers read nothing: no response states an answer."
    sentence = f"The teacher with the right answer knows {scored.known:.2f} nats of a right response"
    noise = scored.noise
    if noise is None:
        return f"{sentence}."
    return (
        f"{sentence}; the noise of a token's contrast is {noise.nats:.2f} nats, and of the tokens that had an alternative "
        f"{100 * noise.for_outcome:.0f} % exceed it twice for the outcome, {100 * noise.against_outcome:.0f} % against it."
    )


def _shown(contrast: Contrast, group: GroupRecord) -> Iterator[CreditedResponse]:
    """Yields the responses of a group, the first one with the image of its problem."""
    image = data_uri(group.images[0]) if group.images else None
    for side in contrast.sides:
        yield CreditedResponse(
            title=response_title(side.verdict == "right", side.reward, step=contrast.step),
            problem=contrast.problem,
            ground_truth=contrast.ground_truth,
            image=image,
            rows=side.rows,
        )
        image = None
