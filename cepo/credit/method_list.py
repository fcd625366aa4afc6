"""Parses the list of methods to measure, such as `a, b(lambda_init=1, negative.select=random)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cepo.algorithms import Estimator, GroupRelativeEstimator, build_estimator, estimator_class, section_of, statistics
from cepo.algorithms.settings import NoSettings
from cepo.errors import ConfigError, did_you_mean
from cepo.files.trees import leaves
from cepo.sections.fields import fields_of
from cepo.sections.reader import default_tree
from cepo.types import TokenBatch, TokenSignal

_OPENING = "([{"
_CLOSING = ")]}"


class LeaveOneOut(GroupRelativeEstimator):
    """`A_i = R_i - mean_{j != i} R_j` for all tokens of rollout i: unbiased, and the reference for other methods."""

    name = "uniform"
    reads = ("group_ids",)

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        centred, _, size = statistics.group_moments(batch.rewards, batch.group_ids)  # R_i - mean_g
        return statistics.outcome_signal(batch, centred * size / (size - 1))


def read_methods(line: str, algorithm: Mapping[str, object]) -> dict[str, Estimator]:
    """Builds the methods of a line by their names in tables, as the user wrote them; `LeaveOneOut` is the first.

    Settings in parentheses override those of `algorithm`, a run's section; `lambda_init` stands for `weight.lambda_init`.
    Advantages are not divided by the standard deviation of their group (`advantage.scale=none`) unless the parentheses say
    so: divided, credit is no longer a difference of probabilities. Raises `ConfigError` if a name or a setting is
    unknown, a method is listed twice, or it gives no advantages here.
    """
    methods: dict[str, Estimator] = {LeaveOneOut.name: LeaveOneOut(NoSettings())}
    for text in _split(line):
        name, _, assignments = text.partition("(")
        if assignments and not assignments.endswith(")"):
            raise ConfigError(f"methods: '{text}' has no closing parenthesis; write name(setting=value, ...)")
        cls = estimator_class(name.strip())
        known_keys = [key for key, _ in leaves(default_tree(cls.Config))]
        overrides = _settings(text, assignments.removesuffix(")"), known_keys)
        tree = section_of(cls.name, algorithm)
        if "advantage" in fields_of(cls.Config):
            tree["advantage"] = {**tree.get("advantage", {}), "scale": "none"}
        settings = OmegaConf.to_container(OmegaConf.merge(tree, overrides))
        estimator = build_estimator(cls.name, settings)  # type: ignore[arg-type]
        _require_advantages(text, estimator)
        if text in methods:
            raise ConfigError(f"methods: '{text}' is given twice in '{line}'; name each method with its settings once")
        methods[text] = estimator
    return methods


def _settings(text: str, assignments: str, known_keys: Sequence[str]) -> Any:
    """Reads `key=value, ...`, in which a key may be the end of a known dotted one."""
    parts = _split(assignments) if assignments.strip() else []
    dotted_assignments: list[str] = []
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"methods: '{text}' names a setting without a value; write name(setting=value, ...)")
        dotted_key = _dotted_key(text, key.strip(), known_keys)
        dotted_assignments.append(f"{dotted_key}={value.strip()}")
    try:
        return OmegaConf.from_dotlist(dotted_assignments)
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"methods: the settings of '{text}' cannot be read: {error}") from error


def _dotted_key(text: str, key: str, known_keys: Sequence[str]) -> str:
    """Returns the known key or section that `key` names, or the one key that ends with it."""
    if any(f"{known_key}.".startswith(f"{key}.") for known_key in known_keys):
        return key
    candidates = [known_key for known_key in known_keys if known_key.endswith(f".{key}")]
    if len(candidates) == 1:
        return candidates[0]
    last_names = [known_key.rpartition(".")[2] for known_key in known_keys]
    raise ConfigError(
        f"methods: '{text}': the method has no setting '{key}'.{did_you_mean(key, last_names)} Known: {', '.join(known_keys)}"
    )


def _require_advantages(text: str, estimator: Estimator) -> None:
    """Rejects methods without advantages, and those that need a critic or a teacher with its own weights."""
    if estimator.distilled_view is not None:
        why = "learns from a divergence to its teacher, so its tokens have no advantages"
    elif "values" in estimator.reads:
        why = "needs a critic, which is not measured here"
    elif estimator.needs_teacher(step=0) and estimator.teacher.source != "actor":
        why = f"has teacher.source={estimator.teacher.source}; a checkpoint has one set of weights, so only actor is measured"
    else:
        return
    raise ConfigError(f"methods: '{text}' {why}; leave it out")


def _split(line: str) -> list[str]:
    """Splits at the commas that are not in brackets."""
    parts = [""]
    depth = 0
    for letter in line:
        if letter in _OPENING:
            depth += 1
        elif letter in _CLOSING:
            depth -= 1
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    parts = [part.strip() for part in parts]
    if not all(parts):
        raise ConfigError(f"methods: '{line}' has an empty part; put one comma between two names or settings")
    return parts
