"""Defines the contract of methods, what methods of evidence share, and the registry, with torch in annotations only."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from pydantic.dataclasses import is_pydantic_dataclass

from cepo.algorithms import credit, settings
from cepo.algorithms.settings import EvidenceConfig, NegativeConfig, TeacherConfig, WeightedConfig
from cepo.errors import ConfigError, did_you_mean
from cepo.files.trees import Fields, Tree
from cepo.metrics import mean_value
from cepo.sections.declaring import fields_of, section
from cepo.sections.reader import default_tree, read_section
from cepo.types import Reference, RolloutGroup, TokenBatch, TokenSignal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor

_registry: dict[str, type[Estimator]] = {}
_plugins: dict[Path, list[str]] = {}
_EstimatorType = TypeVar("_EstimatorType", bound="type[Estimator]")
SHARED: Mapping[str, Any] = {name: field.annotation for name, field in fields_of(settings.SharedSettings).items()}
"""The types of the settings and sections of `algorithm` that methods share, by name."""


class Estimator(ABC):
    """Defines which privileged text each teacher of a method sees, and which learning signal each token gets.

    It holds no state between steps: everything random or scheduled is a function of its config and the step.

    Attributes:
        Config: the settings that the method reads. A field with the name of a section of `SharedSettings`, such as
            `teacher`, takes the values of `algorithm.teacher`, with the field's default as the method's presets; all
            other fields are `algorithm.<name>.*`.
        views: names of the teacher contexts, in a fixed order.
        distilled_view: the view of which the update needs the whole distribution, not only log-probs of sampled tokens.
        needs_group: the method compares the responses to a prompt, so at least two are needed.
        needs_baseline: the method reads the reward of a greedy response to each prompt.
        needs_values: the method reads a critic's values and returns its targets.
        needs_solutions: every problem must have a worked solution.
        reads_answers: teachers may read answers extracted from responses.
        reads_old_log_probs: the signal of a row (of a row with a reference, for a method with views) depends on
            `old_log_probs`. Otherwise rows whose update starts from the weights that sampled them need no scoring.
    """

    name: ClassVar[str]
    Config: ClassVar[type[Any]] = settings.NoSettings
    views: tuple[str, ...] = ()  # of the class, or of the instance if its settings decide
    distilled_view: ClassVar[str | None] = None
    needs_group: bool = False  # likewise
    needs_baseline: ClassVar[bool] = False
    needs_values: ClassVar[bool] = False
    reads_old_log_probs: bool = True  # likewise

    def __init__(self, config: Any) -> None:
        self.config = config
        given = cast("Mapping[str, Any]", vars(config))
        self.teacher: TeacherConfig = given.get("teacher", TeacherConfig())
        self.negative: NegativeConfig = given.get("negative", NegativeConfig())
        sources = [given[side].source for side in ("positive", "negative") if side in given]
        self.needs_solutions = "solution" in sources
        self.reads_answers = "peer_answer" in sources

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        """Returns for each view one reference per rollout; None if the teacher reads the student's own prompt."""
        assert not self.views, f"{type(self).__name__} declares views and must say what they read"
        return {}

    def needs_teacher(self, *, step: int) -> bool:
        """Returns whether teacher log-probs can change the signal of the 0-based rollout step `step`."""
        return bool(self.views)

    def live_rows(self, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"]) -> Bool[Tensor, " B"]:
        """Returns which rows can have a non-zero signal. All others need no student, teacher or update pass."""
        return rewards == rewards

    def settled(self, shown: Mapping[str, Sequence[bool]]) -> Mapping[str, Sequence[bool]]:
        """Returns by view which references are kept, given which can be shown: not empty, and within the context."""
        return shown

    def learning_rows(
        self, live: Bool[Tensor, " B"], has_reference: Mapping[str, Bool[Tensor, " B"]]
    ) -> Bool[Tensor, " B"]:
        """Returns which live rows can still have a non-zero signal, given which of them have a reference."""
        return live

    @abstractmethod
    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        """Computes the learning signal of every response token at the 0-based rollout step `step`."""


class GroupRelativeEstimator(Estimator):
    """Base of methods whose signal is a multiple of a rollout's advantage over its group."""

    needs_group = True

    def live_rows(self, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"]) -> Bool[Tensor, " B"]:
        """Returns True for rollouts of groups whose rewards differ; all others have A = 0."""
        return credit.live_rows(rewards, group_ids)


class WeightedEstimator(GroupRelativeEstimator):
    """Base of methods that scale an advantage A, by default GRPO's, token by token: `A_hat_t = A (1 + lambda (w_t - 1))`.

    `w_t = clip(exp(sign(A) delta_t), 1 - r, 1 + r)` with lambda of the step and clip radius r. Guarantees:
    `sign(A_hat_t) = sign(A)` and `|A_hat_t - A| <= lambda r |A|`. Degenerate cases, each exactly A: lambda = 0 (no
    teacher is used), r = 0, delta_t = 0.
    """

    config: WeightedConfig
    contrast: ClassVar[tuple[str, str]]
    """The policies P and Q of the evidence `delta_t = log P(y_t) - log Q(y_t)`: views, or `student` before the update."""

    def evidence(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        """Computes delta of the two policies of `contrast`."""
        policies = {"student": batch.old_log_probs, **batch.teacher_log_probs}
        log_p, log_q = (policies[name] for name in self.contrast)
        return log_p - log_q

    def mixing(self, step: int) -> float:
        """Returns lambda: linear in the warm-up; then constant, or 0 from `lambda_decay_steps` after it on."""
        weight, after = self.config.weight, step - self.config.weight.lambda_warmup_steps
        if after < 0:
            return weight.lambda_init * (step + 1) / weight.lambda_warmup_steps
        if weight.lambda_schedule == "constant":
            return weight.lambda_init
        return weight.lambda_init * max(0.0, 1.0 - after / weight.lambda_decay_steps)

    def is_weighted(self, step: int) -> bool:
        """Returns whether weights have any effect at this step."""
        return self.mixing(step) > 0 and self.config.weight.clip_radius > 0

    def needs_teacher(self, *, step: int) -> bool:
        return self.is_weighted(step)

    def advantages(self, batch: TokenBatch) -> tuple[Float[Tensor, "B _"], Float[Tensor, "B T"] | None]:
        """Returns A: (B, 1) of the rollouts, or (B, T) of the tokens together with their baseline V_t."""
        return credit.group_advantages(batch.rewards, batch.group_ids, self.config.advantage).unsqueeze(1), None

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        """Computes `A_hat_t` in float64, with 0 on padding; A if no teacher is needed."""
        mask, mixing, radius = batch.response_mask, self.mixing(step), self.config.weight.clip_radius
        advantages, values = self.advantages(batch)
        metrics = credit.group_metrics(batch.rewards, batch.correct, batch.group_ids)
        if not self.needs_teacher(step=step):
            plain = credit.over_response(advantages.squeeze(1), mask)
            return TokenSignal(advantages=plain, metrics=metrics | {"evidence/lambda": mean_value(mixing)})
        counted = mask
        if self.config.weight.mixed_groups_only:
            counted = mask & credit.live_rows(batch.correct.double(), batch.group_ids).unsqueeze(1)
        delta, sign = self.evidence(batch).detach().where(counted, 0.0), credit.advantage_sign(advantages)
        weight = credit.evidence_weight(delta, sign, clip_radius=radius)
        weighted = advantages.double() * (1.0 + mixing * (weight - 1.0))
        metrics |= credit.evidence_metrics(delta, advantages, mask, batch.correct, mixing=mixing, clip_radius=radius)
        raw, clipped = (sign * delta).exp().where(mask, 0.0), weight.to(delta.dtype).where(mask, 0.0)
        diagnostics = {"delta": delta, "raw_weight": raw, "weight": clipped}
        if values is not None:
            metrics |= credit.value_metrics(values, batch)
            diagnostics["value"] = values
        scaled = weighted.to(advantages.dtype).where(mask, 0.0)
        return TokenSignal(advantages=scaled, metrics=metrics, diagnostics=diagnostics)


class EvidenceEstimator(WeightedEstimator):
    """Base of methods that weight GRPO's advantage, or that over the hindsight baseline, by evidence from answers.

    With the hindsight baseline every step uses teachers, and all rollouts learn.
    """

    config: EvidenceConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.in_hindsight = self.config.advantage.baseline == "hindsight"
        self.reads_old_log_probs = self.reads_old_log_probs or self.in_hindsight
        self.positive = self.config.positive
        if self.in_hindsight:  # a baseline must not know how the response ends
            self.positive = dataclasses.replace(self.positive, exclude_self=True)

    def needs_teacher(self, *, step: int) -> bool:
        return self.in_hindsight or self.is_weighted(step)

    def live_rows(self, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"]) -> Bool[Tensor, " B"]:
        return (Estimator if self.in_hindsight else GroupRelativeEstimator).live_rows(self, rewards, group_ids)

    def advantages(self, batch: TokenBatch) -> tuple[Float[Tensor, "B _"], Float[Tensor, "B T"] | None]:
        if self.in_hindsight:
            return credit.hindsight_advantages(batch, self.config.advantage)
        return super().advantages(batch)


def register_estimator(name: str) -> Callable[[_EstimatorType], _EstimatorType]:
    """Decorates a class to register it as `algorithm.adv_estimator=<name>`, with its `Config` as a section.

    Raises `ConfigError`: another class has this name, or a field has the name of a shared section and another type.
    """

    def register(cls: _EstimatorType) -> _EstimatorType:
        if name in _registry:
            raise ConfigError(f"algorithm.adv_estimator '{name}' is already registered by {_registry[name].__module__}")
        cls.name = name
        if not is_pydantic_dataclass(cls.Config):
            cls.Config = section(cls.Config)
        for key, field in fields_of(cls.Config).items():
            own, kind = field.annotation, SHARED.get(key, field.annotation)
            if own is not kind and not (isinstance(own, type) and issubclass(kind, own)):
                raise ConfigError(
                    f"{cls.__qualname__}.Config.{key}: algorithm.{key} is shared by the methods and has the type "
                    f"{kind.__name__}; declare that type, or give the setting another name"
                )
        _registry[name] = cls
        return cls

    return register


def load_plugin(path: str | Path) -> list[str]:
    """Imports a user's Python file (`trainer.plugins`) once, and returns the names of the methods that it registers."""
    file = Path(path).expanduser().resolve()
    if file in _plugins:
        return _plugins[file]
    if not file.is_file():
        raise ConfigError(f"trainer.plugins: {path} is not a file; give the path of a Python file")
    spec = importlib.util.spec_from_file_location(f"cepo_plugin_{file.stem}_{abs(hash(str(file))):x}", file)
    assert spec is not None and spec.loader is not None
    module, before = importlib.util.module_from_spec(spec), set(_registry)
    sys.modules[spec.name] = module  # where the types of its settings are looked up
    spec.loader.exec_module(module)
    _plugins[file] = [name for name in _registry if name not in before]
    return _plugins[file]


def available_estimators() -> list[str]:
    """Returns the names of all methods: those of the modules in `cepo/algorithms/` and of loaded plugins."""
    return sorted(_registry)


def estimator_class(name: str) -> type[Estimator]:
    """Returns the class registered under `name`; raises a `ConfigError` that lists the known methods."""
    if name not in _registry:
        known = available_estimators()
        raise ConfigError(
            f"algorithm.adv_estimator '{name}' is unknown.{did_you_mean(name, known)} Known: {', '.join(known)}"
        )
    return _registry[name]


def own_fields(name: str) -> list[str]:
    """Returns the settings of the method that no other has, `algorithm.<name>.*`."""
    return [field for field in fields_of(estimator_class(name).Config) if field not in SHARED]


def path_of(name: str) -> str:
    """Returns the key before those of a method's settings in messages: `algorithm` if it has none of its own."""
    return f"algorithm.{name}" if own_fields(name) else "algorithm"


def presets_of(name: str) -> Tree:
    """Returns the method's defaults of the shared settings that it reads."""
    return {field: value for field, value in default_tree(estimator_class(name).Config).items() if field in SHARED}


def section_of(name: str, algorithm: Fields) -> Tree:
    """Returns the settings that the method reads, for `build_config`, out of a configuration's section `algorithm`."""
    read: Tree = {}
    for field, declared in fields_of(estimator_class(name).Config).items():
        if field in SHARED and field in algorithm:
            value = algorithm[field]
            if isinstance(value, Mapping):
                known = fields_of(cast("type[Any]", declared.annotation))
                value = {key: each for key, each in cast("Tree", value).items() if key in known}
            read[field] = value
    return read | dict(algorithm.get(name) or {})


def build_config(name: str, mapping: Fields | None) -> Any:
    """Builds the method's `Config` from what `section_of` returns; `ConfigError`: a key or value is not accepted."""
    return read_section(estimator_class(name).Config, mapping or {}, path=path_of(name))


def build_estimator(name: str, config: Fields | None = None) -> Estimator:
    """Builds the method `name` with the settings of its fields; raises `ConfigError` like `build_config`."""
    return estimator_class(name)(build_config(name, config))
