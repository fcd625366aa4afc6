"""The training steps, and which text each teacher is shown."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor, nn

from reference_trainer import equations
from reference_trainer.model import Prompts, ValueModel, adapt, load_policy, response_logits, sampled_log_probs
from reference_trainer.settings import Problem, Response, Settings

EVIDENCE = ("rlsd", "cepo", "rlcsd", "visual", "input_contrast")
DISTILLATION = ("opsd", "sdpo", "srpo")
BY_IMAGE = ("vppo", "papo", "pgpo")
BLACKENED = ("vppo", "papo")
"""Their teacher sees black images of the same size; the others' sees none."""


@dataclass
class Row:
    """A response with everything that the update reads; one number per token, logits (T, V)."""

    group: int
    place: int
    prompt: Mapping[str, Tensor]
    response: Response
    ids: list[int]
    old: numpy.ndarray
    advantage: numpy.ndarray
    reference: numpy.ndarray | None = None
    teacher_logits: Tensor | None = None
    values: numpy.ndarray | None = None
    target: numpy.ndarray | None = None


class ReferenceTrainer:
    """Trains the checkpoint in `folder` on problems with recorded responses.

    Args:
        adapter: initial weights of an adapter, by layer; what they are drawn from is no equation's business.
        critic_head: initial weight and bias of the critic's head, likewise.
    """

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        problems: Sequence[Problem],
        *,
        adapter: Mapping[str, Tensor] | None = None,
        critic_head: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.settings = settings
        self.problems = problems
        self.prompts = Prompts(folder)
        self.policy = load_policy(folder)
        if settings.lora is None:
            self.trained = dict(self.policy.named_parameters())
        else:
            assert adapter is not None
            self.trained = adapt(self.policy, adapter, *settings.lora)
        self.initial = copy.deepcopy(self.policy)
        self.teacher = copy.deepcopy(self.policy)
        self.optimizer = self._adamw(self.trained, settings.learning_rate)
        self.kl_coefficient = 0.0 if settings.kl is None else settings.kl[1]
        self.critic = None if critic_head is None else ValueModel(folder, *critic_head)
        if self.critic is not None:
            self.critic_optimizer = self._adamw(dict(self.critic.named_parameters()), settings.critic_learning_rate)

    def train(self) -> dict[str, Tensor]:
        """The trained weights after all steps, by name."""
        for step in range(self.settings.steps):
            rows = self._scored(step)
            self._estimate(rows, step)
            if self.critic is not None:
                self._update_critic(rows, step)
            self._update(rows, step)
            self._refresh_teacher()
        return {name: weight.detach() for name, weight in self.trained.items()}

    def _adamw(self, weights: Mapping[str, nn.Parameter], rate: float) -> torch.optim.AdamW:
        for weight in weights.values():
            weight.grad = torch.zeros_like(weight)
        return torch.optim.AdamW(
            list(weights.values()), lr=rate, betas=self.settings.betas, weight_decay=self.settings.weight_decay
        )

    @torch.no_grad()
    def _scored(self, step: int) -> list[Row]:
        rows = []
        for number, problem in enumerate(self.problems):
            prompt = self.prompts.encode(problem)
            for place, response in enumerate(problem.responses[step]):
                ids = self.prompts.response_ids(response)
                old = self._log_probs(self.policy, prompt, ids)
                row = Row(number, place, prompt, response, ids, old, numpy.zeros(0))
                if self.settings.kl is not None:
                    row.reference = self._log_probs(self.initial, prompt, ids)
                if self.critic is not None:
                    row.values = self.critic.values(prompt, ids).double().numpy()
                rows.append(row)
        return rows

    def _logits(self, model: Any, prompt: Mapping[str, Tensor], ids: list[int]) -> Tensor:
        return response_logits(model, prompt, ids, self.settings.temperature)

    def _log_probs(self, model: Any, prompt: Mapping[str, Tensor], ids: list[int]) -> numpy.ndarray:
        return sampled_log_probs(self._logits(model, prompt, ids), ids).double().numpy()

    @torch.no_grad()
    def _estimate(self, rows: list[Row], step: int) -> None:
        """Fills the rows' advantages, and what their teachers say."""
        settings = self.settings
        size = len(self.problems[0].responses[step])
        lengths = [len(row.ids) for row in rows]
        token_rewards = equations.outcome_rewards([row.response.reward for row in rows], lengths)
        if settings.kl is not None and settings.kl[2] == "reward":
            token_rewards = self._penalised(rows, token_rewards)
        rewards = [float(row.sum()) for row in token_rewards]
        method = settings.method
        if method in EVIDENCE:
            mixing = equations.mixing_at(step, settings.mixing, settings.mixing_steps)
            if settings.baseline == "hindsight":
                plain = equations.hindsight(rewards, self._deltas(rows, step, one_sided=True), size)
            else:
                plain = equations.spread(equations.group_advantages(rewards, size), lengths)
            advantages = equations.evidence_advantages(plain, self._deltas(rows, step), mixing, settings.radius)
        elif method == "contrast_gate":
            advantages = equations.gated_advantages(
                equations.spread(equations.group_advantages(rewards, size), lengths),
                [self._sides(row, step) for row in rows],
                equations.mixing_at(step, settings.mixing, settings.mixing_steps),
                settings.threshold,
                settings.floor,
            )
        elif method == "hindsight":
            advantages = equations.hindsight(rewards, self._deltas(rows, step), size)
        elif method in DISTILLATION:
            of_groups = [settings.policy_weight * value for value in equations.group_advantages(rewards, size)]
            self._consult(rows, step)
            if method == "srpo":
                of_groups = [
                    value if row.teacher_logits is None else 0.0 for value, row in zip(of_groups, rows, strict=True)
                ]
            advantages = equations.spread(of_groups, lengths)
        elif method in BY_IMAGE:
            advantages = self._by_image(rows, equations.group_advantages(rewards, size), step)
        elif method == "rlcsd_released":
            has_both = [self._has_both_sides(row, step) for row in rows]
            advantages = equations.residual_advantages(
                equations.group_advantages(rewards, size),
                self._deltas(rows, step),
                has_both,
                strength=0.5,
                tau=0.02,
                threshold=0.02,
            )
        elif method == "gae":
            values = [row.values for row in rows if row.values is not None]
            raw = equations.generalised(token_rewards, values, settings.gamma, settings.gae_lambda)
            for row, advantage, value in zip(rows, raw, values, strict=True):
                row.target = advantage + value
            advantages = equations.whitened(raw)
        elif method == "reinforce_plus_plus":
            advantages = equations.whitened(equations.returns(token_rewards, settings.gamma))
        elif method == "remax":
            above = [
                reward - self.problems[row.group].greedy[step].reward for row, reward in zip(rows, rewards, strict=True)
            ]
            advantages = equations.spread(above, lengths)
        else:
            of_group = {
                "grpo": equations.group_advantages,
                "rloo": equations.leave_one_out,
                "grpo_passk": equations.best_of_group,
            }[method]
            advantages = equations.spread(of_group(rewards, size), lengths)
        for row, advantage in zip(rows, advantages, strict=True):
            row.advantage = advantage

    def _by_image(self, rows: list[Row], plain: list[float], step: int) -> equations.Rows:
        deltas = self._deltas(rows, step)
        if self.settings.method == "papo":
            return equations.papo_advantages(plain, deltas, weight=0.02, bonus=0.05)
        if self.settings.method == "pgpo":
            return equations.pgpo_advantages(plain, deltas, threshold=0.4, boost=2.0)
        sees_image = [bool(self.problems[row.group].images) for row in rows]
        return equations.vppo_advantages(plain, deltas, sees_image, share=0.4, lowest=0.9, bonus=0.06)

    def _has_both_sides(self, row: Row, step: int) -> bool:
        """Whether another response of the group is right, and another one wrong."""
        problem = self.problems[row.group]
        group = problem.responses[step]
        right = _right_texts(problem, group, self.settings)[row.place]
        return right is not None and bool(_wrong_texts(group, row.place, self.settings))

    def _penalised(self, rows: list[Row], token_rewards: equations.Rows) -> equations.Rows:
        """r_t - coefficient KL_t; then the coefficient moves."""
        assert self.settings.kl is not None
        penalties = []
        for row in rows:
            assert row.reference is not None
            penalties.append(equations.kl_estimate(row.old, row.reference, self.settings.kl[0]))
        result = [
            rewards - self.kl_coefficient * penalty for rewards, penalty in zip(token_rewards, penalties, strict=True)
        ]
        if self.settings.adaptive is not None:
            observed = float(numpy.mean([penalty.mean() for penalty in penalties]))
            self.kl_coefficient = equations.next_coefficient(
                self.kl_coefficient, observed, *self.settings.adaptive, sequences=len(rows)
            )
        return result

    def _deltas(self, rows: list[Row], step: int, *, one_sided: bool = False) -> equations.Rows:
        """log P(with the right answer) - log P(with the wrong answer, or without any), or what the method contrasts."""
        deltas = []
        for row in rows:
            problem = self.problems[row.group]
            group = problem.responses[step]
            if self.settings.method in ("visual", *BY_IMAGE):
                images = ()
                if self.settings.method in BLACKENED:
                    images = tuple(Image.new("RGB", image.size) for image in problem.images)
                changed = dataclasses.replace(problem, images=images)
                deltas.append(row.old - self._log_probs(self.teacher, self.prompts.encode(changed), row.ids))
                continue
            if self.settings.method == "input_contrast":
                next_problem = self.problems[(row.group + 1) % len(self.problems)]
                deltas.append(row.old - self._log_probs(self.teacher, self.prompts.encode(next_problem), row.ids))
                continue
            right = _right_texts(problem, group, self.settings)[row.place]
            if right is None:
                deltas.append(numpy.zeros(len(row.ids)))
                continue
            right_side = self._teacher_log_probs(row, right)
            wrong = [] if one_sided else _wrong_texts(group, row.place, self.settings)
            if wrong:
                probabilities = numpy.exp([self._teacher_log_probs(row, text) for text in wrong])
                wrong_side = numpy.log(numpy.mean(probabilities, axis=0))
            else:
                wrong_side = row.old
            deltas.append(right_side - wrong_side)
        return deltas

    def _teacher_log_probs(self, row: Row, text: str) -> Any:
        prompt = self.prompts.encode(self.problems[row.group], text)
        return self._log_probs(self.teacher, prompt, row.ids)

    def _sides(self, row: Row, step: int) -> equations.Sides:
        """log P(with the right answer) and log P(with the wrong one); None unless there are both."""
        problem = self.problems[row.group]
        group = problem.responses[step]
        right = _right_texts(problem, group, self.settings)[row.place]
        wrong = _wrong_text(group, self.settings)
        if right is None or wrong is None:
            return None
        return self._teacher_log_probs(row, right), self._teacher_log_probs(row, wrong)

    def _consult(self, rows: list[Row], step: int) -> None:
        for row in rows:
            problem = self.problems[row.group]
            group = problem.responses[step]
            right = _right_texts(problem, group, self.settings)[row.place]
            is_routed = self.settings.method != "srpo" or not row.response.right
            if right is not None and is_routed:
                row.teacher_logits = self._logits(self.teacher, self.prompts.encode(problem, right), row.ids)

    def _updates(self, rows: list[Row]) -> list[list[Row]]:
        size = self.settings.prompts_per_update
        updates: list[list[Row]] = []
        for start in range(0, len(self.problems), size):
            updates.append([row for row in rows if start <= row.group < start + size])
        return updates

    def _update(self, rows: list[Row], step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = equations.learning_rate(step, self.settings.learning_rate, self.settings.horizon)
        for part in self._updates(rows) * self.settings.epochs:
            self.optimizer.zero_grad(set_to_none=False)
            lengths = [len(row.ids) for row in part]
            sureness = self._sureness(part)
            for row in part:
                (
                    self._losses(row, sureness).sum() * equations.token_weight(len(row.ids), lengths, self.settings)
                ).backward()
            torch.nn.utils.clip_grad_norm_(list(self.trained.values()), self.settings.max_norm)
            self.optimizer.step()

    def _sureness(self, rows: list[Row]) -> float:
        """The mean of exp(-beta H) over the distilled tokens of an update, H the teacher's entropy."""
        if self.settings.divergence is None:
            return 1.0
        factors: list[float] = []
        for row in rows:
            if row.teacher_logits is not None:
                factors += equations.sureness(row.teacher_logits, self.settings.divergence).tolist()
        return sum(factors) / len(factors) if factors else 1.0

    def _losses(self, row: Row, mean_sureness: float) -> Tensor:
        """(T,) of one response, with gradient."""
        settings = self.settings
        logits = self._logits(self.policy, row.prompt, row.ids)
        log_probs = sampled_log_probs(logits, row.ids)
        old = torch.tensor(row.old, dtype=torch.float32)
        losses = equations.policy_losses(log_probs, old, torch.tensor(row.advantage, dtype=torch.float32), settings)
        if settings.kl is not None and settings.kl[2] == "loss":
            assert row.reference is not None
            reference = torch.tensor(row.reference, dtype=torch.float32)
            losses = losses + settings.kl[1] * equations.kl_losses(log_probs, reference, settings.kl[0])
        if row.teacher_logits is not None:
            assert settings.divergence is not None
            weight = equations.importance(log_probs, old, settings.divergence)
            weight = weight * equations.sureness(row.teacher_logits, settings.divergence) / mean_sureness
            losses = losses + weight * equations.divergences(logits, row.teacher_logits, settings.divergence)
        return losses

    def _update_critic(self, rows: list[Row], step: int) -> None:
        """Half the larger squared error of the value and of the value kept near the old one."""
        assert self.critic is not None
        for group in self.critic_optimizer.param_groups:
            group["lr"] = self.settings.critic_learning_rate
        clip = self.settings.critic_clip
        for part in self._updates(rows):
            self.critic_optimizer.zero_grad(set_to_none=False)
            lengths = [len(row.ids) for row in part]
            for row in part:
                values = self.critic.values(row.prompt, row.ids)
                old = torch.tensor(row.values, dtype=torch.float32)
                target = torch.tensor(row.target, dtype=torch.float32)
                near = old + (values - old).clamp(-clip, clip)
                losses = torch.maximum((values - target) ** 2, (near - target) ** 2) / 2
                weight = equations.token_weight(len(row.ids), lengths, self.settings)
                (losses.sum() * weight).backward()
            torch.nn.utils.clip_grad_norm_(list(self.critic.parameters()), self.settings.max_norm)
            self.critic_optimizer.step()

    @torch.no_grad()
    def _refresh_teacher(self) -> None:
        """actor: the policy itself; reference: never; ema: an average of the trained weights."""
        if self.settings.teacher == "actor":
            self.teacher = copy.deepcopy(self.policy)
        elif self.settings.teacher == "ema":
            for old, new in zip(self.teacher.parameters(), self.policy.parameters(), strict=True):
                old.mul_(self.settings.ema_decay).add_(new, alpha=1 - self.settings.ema_decay)
        else:
            assert self.settings.teacher == "reference", self.settings.teacher


def _right_texts(problem: Problem, group: Sequence[Response], settings: Settings) -> list[str | None]:
    """The right side for each response of the group; None for no reference."""
    if settings.right_source == "ground_truth":
        return [problem.truth] * len(group)
    result: list[str | None] = []
    right_places = [place for place, peer in enumerate(group) if peer.right]
    for place in range(len(group)):
        peers = [peer for peer in right_places if peer != place or not settings.exclude_self]
        best = max(peers, key=lambda index: (group[index].reward, -index), default=None)
        result.append(None if best is None else _shown(group[best], settings.right_source))
    return result


def _wrong_text(group: Sequence[Response], settings: Settings) -> str | None:
    """The wrong side, the same for the whole group: of the wrong response with the lowest reward, the first of equals."""
    wrong = [peer for peer in group if not peer.right]
    if settings.wrong_source == "peer_answer":
        wrong = [peer for peer in wrong if peer.answer is not None]
    chosen = min(wrong, key=lambda peer: peer.reward, default=None)
    return None if chosen is None else _shown(chosen, settings.wrong_source)


def _wrong_texts(group: Sequence[Response], own: int, settings: Settings) -> list[str]:
    """What the wrong teachers of one response read: one text for cepo; for rlcsd those of other responses, each once."""
    if settings.method == "cepo":
        text = _wrong_text(group, settings)
        return [] if text is None else [text]
    if settings.method not in ("rlcsd", "rlcsd_released"):
        return []
    wrong_peers = [peer for place, peer in enumerate(group) if place != own and not peer.right]
    answers = [_shown(peer, settings.wrong_source) for peer in sorted(wrong_peers, key=lambda peer: peer.reward)]
    texts = [text for text in answers if text is not None]
    return list(dict.fromkeys(texts))[: settings.num_wrong]


def _shown(response: Response, source: str) -> str | None:
    if source == "peer_answer":
        return response.answer
    assert source == "peer_full", source
    return " ".join(response.text.split())
