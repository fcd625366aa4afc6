"""The contract of a method and its registry. Torch-free, so that configs are checked without importing it."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from pydantic.dataclasses import is_pydantic_dataclass

from cepo.algorithms import credit
from cepo.algorithms.settings import NegativeConfig, NoSettings, PositiveConfig, TeacherConfig
from cepo.errors import ConfigError, did_you_mean
from cepo.sections import read_section, section
from cepo.types import Reference, RolloutGroup, TokenBatch, TokenSignal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor

_registry: dict[str, type[Estimator]] = {}
_EstimatorType = TypeVar("_EstimatorType", bound="type[Estimator]")
_Section = TypeVar("_Section", TeacherConfig, PositiveConfig, NegativeConfig)


class Estimator(ABC):
    """A method: which privileged text each teacher sees, and which learning signal each token gets.

    `distilled_view`: the view whose whole distribution the update needs, not its log-probs of sampled tokens alone.
    `needs_group`: compares the responses to one prompt, so at least two are needed. `needs_baseline`: reads the reward of a
    greedy response to each prompt. `needs_values`: reads a critic's values, and returns its targets. `reads_old_log_probs`:
    the signal of a row depends on `old_log_probs` (for a method with views: of a row with a reference); where it does not,
    rows whose update starts from the weights that sampled them get no pass for them. `shared_settings`: for settings
    `algorithm.<key>` that several methods have, the method's own name of it, which wins where both are written.

    A subclass is registered by name, declares its `views` (teacher contexts, in a fixed order) and holds no state between
    steps: everything random or scheduled is a function of its config and the step.
    """

    name: ClassVar[str]
    Config: ClassVar[type[Any]] = NoSettings
    views: tuple[str, ...] = ()  # a class's own, unless its settings decide
    distilled_view: ClassVar[str | None] = None
    needs_group: bool = False  # likewise
    needs_baseline: ClassVar[bool] = False
    needs_values: ClassVar[bool] = False
    reads_old_log_probs: bool = True  # likewise
    shared_settings: ClassVar[Mapping[str, str]] = {}

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def teacher(self) -> TeacherConfig:
        """Weights, placement and wording of this method's teachers."""
        return self._declared(TeacherConfig) or TeacherConfig()

    @property
    def negative(self) -> NegativeConfig:
        """How this method chooses wrong answers; the defaults for one that has no such settings."""
        return self._declared(NegativeConfig) or NegativeConfig()

    @property
    def needs_solutions(self) -> bool:
        """Whether every problem must have a worked solution."""
        positive = self._declared(PositiveConfig)
        return positive is not None and positive.source == "solution"

    @property
    def reads_answers(self) -> bool:
        """Whether it shows answers that were extracted from responses."""
        sides = (self._declared(PositiveConfig), self._declared(NegativeConfig))
        return any(side is not None and side.source == "peer_answer" for side in sides)

    def _declared(self, kind: type[_Section]) -> _Section | None:
        """The section of this kind among the method's settings; None if the method declares none."""
        settings = cast("Mapping[str, object]", vars(self.config))
        return next((value for value in settings.values() if isinstance(value, kind)), None)

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        """For each view one entry per rollout of the group; None makes the view the student's own for that rollout."""
        assert not self.views, f"{type(self).__name__} declares views and must say what they read"
        return {}

    def needs_teacher(self, *, step: int) -> bool:
        """Whether teacher log-probs can change the signal of the 0-based rollout step `step`."""
        del step
        return bool(self.views)

    def live_rows(self, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"]) -> Bool[Tensor, " B"]:
        """Rows whose signal can be non-zero. Rows outside need no student, teacher or update pass."""
        del group_ids
        return rewards == rewards

    def settled(self, shown: Mapping[str, Sequence[bool]]) -> Mapping[str, Sequence[bool]]:
        """Which rollouts' references stay, by view, once some have turned out to be empty or without room in the context.

        Args:
            shown: view -> for each rollout whether a reference can be shown.
        """
        return shown

    def learning_rows(
        self, live: Bool[Tensor, " B"], has_reference: Mapping[str, Bool[Tensor, " B"]]
    ) -> Bool[Tensor, " B"]:
        """The live rows whose signal can still be non-zero, now that it is known who reads a reference."""
        del has_reference
        return live

    @abstractmethod
    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        """The learning signal of every response token at the 0-based rollout step `step`."""


class GroupRelativeEstimator(Estimator):
    """A method whose signal is a multiple of how a rollout compares with the others of its group."""

    needs_group = True

    def live_rows(self, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"]) -> Bool[Tensor, " B"]:
        """Rollouts of groups whose rewards differ; all others have A = 0."""
        return credit.live_rows(rewards, group_ids)


def register_estimator(name: str) -> Callable[[_EstimatorType], _EstimatorType]:
    """Class decorator that makes a method available as `algorithm.adv_estimator=<name>`, and its `Config` a section.

    Raises:
        ConfigError: another class already has this name.
    """

    def register(cls: _EstimatorType) -> _EstimatorType:
        if name in _registry:
            raise ConfigError(f"algorithm.adv_estimator '{name}' is already registered by {_registry[name].__module__}")
        cls.name = name
        if not is_pydantic_dataclass(cls.Config):
            cls.Config = section(cls.Config)
        _registry[name] = cls
        return cls

    return register


def load_plugin(path: str | Path) -> None:
    """Imports a user's Python file (`trainer.plugins`), whose estimators register themselves; a second call does nothing.

    Raises:
        ConfigError: the file does not exist.
    """
    file = Path(path).expanduser().resolve()
    module_name = f"cepo_plugin_{file.stem}_{abs(hash(str(file))):x}"
    if module_name in sys.modules:
        return
    if not file.is_file():
        raise ConfigError(f"trainer.plugins: {path} is not a file; give the path of a Python file")
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]  # else a second call would take the half-imported file for a loaded one
        raise


def available_estimators() -> list[str]:
    """Names of all methods: those in `cepo/algorithms/`, found by themselves, and those of loaded plugins."""
    _import_own_methods()
    return sorted(_registry)


@cache
def _import_own_methods() -> None:
    """Once: a report asks for the methods thousands of times, and each search reads the folder."""
    package = importlib.import_module("cepo.algorithms")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"cepo.algorithms.{module.name}")


def estimator_class(name: str) -> type[Estimator]:
    """The class registered under `name`.

    Raises:
        ConfigError: no such method; the message lists the known ones.
    """
    known = available_estimators()
    if name not in _registry:
        raise ConfigError(
            f"algorithm.adv_estimator '{name}' is unknown.{did_you_mean(name, known)} Known: {', '.join(known)}"
        )
    return _registry[name]


def build_config(name: str, mapping: Mapping[str, Any] | None) -> Any:
    """The method's `Config` from its YAML section `algorithm.<name>`.

    Raises:
        ConfigError: unknown method, unknown key, wrong type or bad value.
    """
    return read_section(estimator_class(name).Config, mapping or {}, path=f"algorithm.{name}")


def build_estimator(name: str, config: Mapping[str, Any] | None = None) -> Estimator:
    """The method `name` with the settings of its section; raises `ConfigError` like `build_config`."""
    return estimator_class(name)(build_config(name, config))
