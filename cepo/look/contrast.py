"""Scores recorded responses with a model by two teachers: the contrast of each token, as `cepo credit` measures it."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from cepo.algorithms import Estimator, build_estimator, statistics
from cepo.algorithms.evidence import beliefs
from cepo.config import RunConfig, load_config
from cepo.credit.agreement import FIRST_STEP, MethodSignal, Scorer, Scoring, knowledge, signals_of
from cepo.data.images import open_image
from cepo.data.prompts import ContextBuilder, Problem
from cepo.errors import DataError
from cepo.files.safe_files import LARGEST_IMAGE, read_bytes
from cepo.files.trees import Tree
from cepo.models.processing import Processing, load_processing
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
    """Groups with the contrast of each token, and what the teachers know: see `cepo.credit.agreement.known`.

    `beliefs` are `cepo.algorithms.evidence.beliefs`, P(right) before each token, by the place of a response in its group.
    """

    groups: Sequence[GroupRecord]
    beliefs: Sequence[Mapping[int, Sequence[float]]]
    knowledge: Sequence[Tree]
    separation: float | None
    noise: ContrastNoise | None


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A model with what its evidence needs beside it."""

    config: RunConfig
    processing: Processing
    rewards: RewardPool
    backend: Scorer


def scored_groups(groups: Sequence[ResponseGroup], model: str, *, responses: int) -> ScoredGroups:
    """Scores the last mixed groups, of the most frequent size, with about so many responses, by a model or a checkpoint.

    Raises `DataError`: no group has both a right and a wrong response.
    """
    chosen = chosen_groups(groups, responses=responses)
    with opened(model, longest=max(len(each.response) for group in chosen for each in group.responses)) as session:
        return scored_by(session, chosen)


def chosen_groups(groups: Sequence[ResponseGroup], *, responses: int) -> list[ResponseGroup]:
    """Returns the last groups with right and wrong responses, of the most frequent size; raises `DataError` if there is none."""
    mixed = [group for group in groups if 0 < group.num_right < len(group.responses) and not group.is_dead]
    if not mixed:
        raise DataError("no group has both a right and a wrong response, so there is nothing to contrast")
    (size, _), *_ = Counter(len(group.responses) for group in mixed).most_common(1)
    of_size = [group for group in mixed if len(group.responses) == size]
    return of_size[-max(1, responses // size) :]


def text_only(groups: Sequence[ResponseGroup]) -> list[ResponseGroup]:
    """Returns groups without the names of their images, for a model that reads texts."""
    return [ResponseGroup(responses=[replace(each, images=()) for each in group.responses]) for group in groups]


@contextlib.contextmanager
def opened(model: str, *, longest: int) -> Iterator[OpenedModel]:
    """Opens a model folder, a hub name or global_step_<N> of a run, in float32 on a processor."""
    actor_folder: Path | None = None
    settings = [*_SETTINGS, f"data.max_response_length={longest + 1}"]
    if not torch.cuda.is_available():
        settings += ["worker.actor.fsdp.mp_param_dtype=fp32"]
    if Path(model).is_dir() and not (Path(model) / "config.json").is_file():
        config, actor_folder = config_of_checkpoint(model, settings)
    else:
        config = config_of_model(model, settings)
    method = build_estimator(_METHOD, _TEACHERS)
    processing = load_processing(config.worker.actor.model, chat_template=config.data.override_chat_template)
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
        yield OpenedModel(config=config, processing=processing, rewards=rewards, backend=actor)


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
    return ScoredGroups(
        groups=records,
        beliefs=_beliefs(signal, records),
        knowledge=knowledge([signal], rollouts, seed=session.config.trainer.seed),
        separation=_separation(records),
        noise=contrast_noise(signal.batch, signal.signal.diagnostics["delta"]),
    )


def _beliefs(signal: MethodSignal, groups: Sequence[GroupRecord]) -> list[dict[int, list[float]]]:
    """Returns P(right) before each token, by place in each group. A response that alone is right reads its own answer."""
    values = iter(beliefs(signal.batch))  # of each response, (T,)
    believed: list[dict[int, list[float]]] = []
    for group in groups:
        of_group = {place: next(values)[: len(each.tokens)].tolist() for place, each in enumerate(group.rollouts)}
        believed.append(of_group)
    return believed


def _rollouts_of(groups: Sequence[ResponseGroup], session: Scoring, method: Estimator) -> Rollouts:
    """Returns recorded responses as a step's rollouts; their own end token is added to those that were not cut."""
    processing = session.processing
    contexts = ContextBuilder(processing, method.teacher, max_context_length=session.config.data.max_prompt_length)
    problems: list[Problem] = []
    for number, group in enumerate(groups):
        first = group.responses[0]
        images = [_image(name) for name in first.images]
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


def _image(name: str) -> Image.Image:
    return open_image(read_bytes(Path(name), largest=LARGEST_IMAGE), formats=("PNG", "JPEG")).convert("RGB")


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


def _separation(groups: Sequence[GroupRecord]) -> float | None:
    """Returns `(mean of delta over right responses' tokens - over wrong ones') / sd of delta`; None if it is undefined.

    It is not the contrast-to-noise ratio of `cepo credit`, which needs the true credit of each token; see `ContrastNoise`.
    """
    by_verdict: dict[bool, list[float]] = {True: [], False: []}
    for group in groups:
        for rollout in group.rollouts:
            by_verdict[rollout.right] += rollout.delta or []
    right, wrong = (torch.tensor(by_verdict[verdict], dtype=torch.float64) for verdict in (True, False))
    spread = float(torch.cat([right, wrong]).std()) if len(right) + len(wrong) > 1 else 0.0
    if not len(right) or not len(wrong) or spread == 0 or not math.isfinite(spread):
        return None
    return float(right.mean() - wrong.mean()) / spread


def contrast_sections(scored: ScoredGroups) -> list[Section]:
    """Returns the parts of a page with the clearest pair, and with all responses that were scored."""
    pairs = zip(scored.groups, scored.beliefs, strict=True)
    ranked = sorted(pairs, key=lambda pair: clearest_pair(pair[0].rollouts)[0], reverse=True)
    group, believed = ranked[0]
    clearest = contrast_of(group, clearest_pair(group.rollouts)[1], method=_METHOD, beliefs=believed)
    note = (
        f"Blue is credit, orange blame: a token that the right answer of the group makes likelier than a wrong one. "
        f"The colours reach from {clearest.low:.2f} to {clearest.high:.2f} times {clearest.uniform}. "
        f"{_BELIEF_NOTE}"
    )
    others: list[CreditedResponse] = []
    for each, believed_of_each in ranked:
        places = range(len(each.rollouts))
        others += _shown(contrast_of(each, places, method=_METHOD, beliefs=believed_of_each), each)
    return [
        Section(
            title="The clearest pair, token by token",
            notes=[clearest.sentence, note, gauge(scored)],
            responses=list(_shown(clearest, group)),
            closed=False,
        ),
        Section(
            title="All scored responses",
            responses=others,
        ),
    ]


def known_nats(scored: ScoredGroups) -> float | None:
    """Returns how many nats the teacher with the right answer knows of a right response; None if it has read nothing."""
    for row in scored.knowledge:
        if row["name"].endswith("correct"):
            return row["nats"]["value"]
    return None


def gauge(scored: ScoredGroups) -> str:
    """Returns in a sentence what the teachers know of the responses."""
    parts: list[str] = []
    known = known_nats(scored)
    if known is not None:
        parts.append(f"the teacher with the right answer knows {known:.2f} nats of a right response")
    if scored.separation is not None:
        parts.append(
            f"the contrast of a token in right and in wrong responses is {scored.separation:.2f} standard deviations apart"
        )
    noise = scored.noise
    if parts and noise is not None:
        parts.append(
            f"its noise is {noise.nats:.2f} nats, and of the tokens that had an alternative {100 * noise.for_outcome:.0f} % "
            f"exceed it twice for the outcome, {100 * noise.against_outcome:.0f} % against it"
        )
    return f"{'; '.join(parts).capitalize()}." if parts else "The teachers read nothing: no response states an answer."


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
