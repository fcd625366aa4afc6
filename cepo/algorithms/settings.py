"""Settings that methods share, and the strict reading of a settings dataclass from a mapping."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from cepo.errors import ConfigError, did_you_mean, require, require_choice
from cepo.types import DivergenceConfig

_Settings = TypeVar("_Settings")

PEER_SOURCES = ("peer_answer", "peer_full", "peer_prefix", "peer_suffix")
DEFAULT_ESTIMATOR = "grpo"
"""EasyR1's default of `algorithm.adv_estimator`."""
REFERENCE_SOURCES = ("ground_truth", *PEER_SOURCES)
SOLUTION_SOURCES = ("solution", "solution_or_answer")
POSITIVE_SOURCES = (*REFERENCE_SOURCES, *SOLUTION_SOURCES)
NEGATIVE_SELECTIONS = ("lowest_reward", "random", "most_frequent")
NEGATIVE_FALLBACKS = ("student", "neutral")
TEACHER_SOURCES = ("actor", "reference", "snapshot", "ema")
PLACEMENTS = ("user_suffix", "assistant_prefix", "free")
LAMBDA_SCHEDULES = ("linear", "constant")
ADVANTAGE_SCALES = ("std", "none")


@dataclass(frozen=True, kw_only=True)
class GroupAdvantageConfig:
    """`ddof`: 1 divides the variance by n-1, 0 by n. `scale`: `std` divides by the deviation, `none` does not (Dr. GRPO)."""

    ddof: int = 1
    scale: str = "std"

    def __post_init__(self) -> None:
        require(self.ddof in (0, 1), "ddof", self.ddof, "0 or 1")
        require_choice("scale", self.scale, ADVANTAGE_SCALES)


@dataclass(frozen=True, kw_only=True)
class PositiveConfig:
    """Where the right answer comes from.

    `num_tokens` is the length of a peer prefix or suffix, and the cap of `solution`, the dataset's worked solution, which every
    row must then have; `solution_or_answer` shows the ground truth where a row has none.
    `success_threshold`: a peer is right whose total reward reaches it; null takes the verifier's verdict.
    `exclude_self`: a rollout never reads its own response; without another right one it has no reference.
    """

    source: str = "ground_truth"
    num_tokens: int = 512
    success_threshold: float | None = None
    exclude_self: bool = False

    @property
    def from_peer(self) -> bool:
        """Whether another response of the group is shown."""
        return self.source in PEER_SOURCES

    def __post_init__(self) -> None:
        require_choice("source", self.source, POSITIVE_SOURCES)
        require(self.num_tokens > 0, "num_tokens", self.num_tokens, "a positive number")
        threshold = self.success_threshold
        require(
            threshold is None or math.isfinite(threshold), "success_threshold", threshold, "a finite number or null"
        )


@dataclass(frozen=True, kw_only=True)
class NegativeConfig:
    """Where the wrong answer comes from, which wrong rollout gives it, and what happens where none does.

    `strict_lowest` follows the paper to the letter: the lowest reward among all wrong rollouts, even if its answer cannot
    be extracted (then the fallback applies). `fallback`: `student` sets P_wrong := P_student, `neutral` gives no evidence.
    """

    source: str = "peer_answer"
    num_tokens: int = 512
    select: str = "lowest_reward"
    strict_lowest: bool = False
    fallback: str = "student"

    def __post_init__(self) -> None:
        require_choice("source", self.source, REFERENCE_SOURCES)
        require(self.num_tokens > 0, "num_tokens", self.num_tokens, "a positive number")
        require_choice("select", self.select, NEGATIVE_SELECTIONS)
        require_choice("fallback", self.fallback, NEGATIVE_FALLBACKS)


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """Whose weights teach, and how the reference is put before the teacher.

    `source`: `actor` (live weights), `reference` (initial weights; adapter off under LoRA), `snapshot` (refreshed after every
    update whose 1-based step is divisible by `sync_every`), `ema` (`ema_decay` per step, float32 buffers).
    `template`: path of a Jinja file with `prompt` and `reference`; null takes the built-in wording of the placement.
    `max_reference_tokens` caps answers; longer kinds of reference are capped by their own `num_tokens`.
    """

    source: str = "actor"
    sync_every: int = 1
    ema_decay: float = 0.999
    placement: str = "user_suffix"
    template: str | None = None
    with_images: bool = True
    max_reference_tokens: int = 64

    def __post_init__(self) -> None:
        require_choice("source", self.source, TEACHER_SOURCES)
        require_choice("placement", self.placement, PLACEMENTS)
        require(self.sync_every > 0, "sync_every", self.sync_every, "a positive number of steps")
        require(0 <= self.ema_decay < 1, "ema_decay", self.ema_decay, "0 <= decay < 1")
        require(self.max_reference_tokens > 0, "max_reference_tokens", self.max_reference_tokens, "positive")


@dataclass(frozen=True, kw_only=True)
class EvidenceConfig(GroupAdvantageConfig):
    """Settings of the evidence methods: the mixing weight's schedule, the clip radius, the positive reference, the teacher.

    `lambda_warmup_steps` raises lambda linearly from `lambda_init / lambda_warmup_steps` before the decay begins.
    """

    lambda_init: float = 0.5
    lambda_schedule: str = "linear"
    lambda_decay_steps: int = 25
    lambda_warmup_steps: int = 0
    clip_radius: float = 0.5
    positive: PositiveConfig = field(default_factory=PositiveConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.lambda_init <= 1, "lambda_init", self.lambda_init, "0 <= lambda_init <= 1")
        require_choice("lambda_schedule", self.lambda_schedule, LAMBDA_SCHEDULES)
        require(
            self.lambda_decay_steps > 0, "lambda_decay_steps", self.lambda_decay_steps, "a positive number of steps"
        )
        require(self.lambda_warmup_steps >= 0, "lambda_warmup_steps", self.lambda_warmup_steps, "0 or more steps")
        require(0 <= self.clip_radius < 1, "clip_radius", self.clip_radius, "0 <= clip_radius < 1")

    def lambda_at(self, step: int) -> float:
        """lambda at the 0-based rollout step: a pure function, so that a resumed run continues exactly.

        linear: `lambda_init * max(0, 1 - k / lambda_decay_steps)` with k counted from the end of the warm-up.
        """
        if step < self.lambda_warmup_steps:
            return self.lambda_init * (step + 1) / self.lambda_warmup_steps
        if self.lambda_schedule == "constant":
            return self.lambda_init
        return self.lambda_init * max(0.0, 1.0 - (step - self.lambda_warmup_steps) / self.lambda_decay_steps)


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(GroupAdvantageConfig):
    """Settings of the distillation methods.

    `weight` scales the divergence, `policy_weight` the group advantage beside it (0: the reward trains nothing). `ddof` and
    `scale` are of that group advantage.
    """

    weight: float = 1.0
    policy_weight: float = 0.0
    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)
    positive: PositiveConfig = field(default_factory=PositiveConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.weight < math.inf, "weight", self.weight, "0 or a positive number")
        require(0 <= self.policy_weight < math.inf, "policy_weight", self.policy_weight, "0 or a positive number")
        require(
            self.weight + self.policy_weight > 0,
            "weight",
            f"{self.weight} with policy_weight {self.policy_weight}",
            "a positive number for at least one of the two; else nothing is learned",
        )


def config_from_mapping(config_class: type[_Settings], mapping: Mapping[str, Any], *, path: str) -> _Settings:
    """Reads a settings dataclass, nested ones included. Keys that are not given keep the default of the section they are in.

    Raises:
        ConfigError: an unknown key (with the nearest known one), a wrong type, or a value the dataclass refuses;
            every message begins with the full key.
    """
    return _section(config_class, mapping, None, path=path)


def _section(config_class: type[_Settings], mapping: Any, defaults: _Settings | None, *, path: str) -> _Settings:
    """`defaults` are those of the section around this one: a method may give a nested section other ones than its class."""
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{path} is {mapping!r}; accepted: a section with keys")
    hints = typing.get_type_hints(config_class)
    fields = {entry.name: entry for entry in dataclasses.fields(cast(Any, config_class))}
    values: dict[str, Any] = {}
    for key, value in cast("Mapping[str, Any]", mapping).items():
        if key not in fields:
            raise ConfigError(f"{path}.{key} is unknown.{did_you_mean(str(key), fields)} Known: {', '.join(fields)}")
        if dataclasses.is_dataclass(hints[key]):
            inner = _default_section(fields[key]) if defaults is None else getattr(defaults, key)
            values[key] = _section(cast("type[Any]", hints[key]), value, inner, path=f"{path}.{key}")
        else:
            values[key] = _convert(value, hints[key], path=f"{path}.{key}")
    try:
        return config_class(**values) if defaults is None else dataclasses.replace(cast(Any, defaults), **values)
    except ConfigError as error:
        raise ConfigError(f"{path}.{error}") from None


def _default_section(entry: dataclasses.Field[Any]) -> Any:
    """What a nested section is where its mapping says nothing; None where it has no default."""
    return None if entry.default_factory is dataclasses.MISSING else entry.default_factory()


def _convert(value: Any, hint: Any, *, path: str) -> Any:
    accepted: tuple[Any, ...] = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in accepted:
        if kind is type(None) and value is None:
            return None
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if kind in (int, str, bool) and type(value) is kind:
            return value
    names = " or ".join("null" if kind is type(None) else str(getattr(kind, "__name__", kind)) for kind in accepted)
    raise ConfigError(f"{path} is {value!r}; accepted: {names}")
