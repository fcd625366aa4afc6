"""What a reward function receives and must return (EasyR1's contract), and how functions are loaded and combined.

A function is named by its file, `path/to/file.py:function`. Reward workers import this module before their path is set.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast

from cepo.errors import RewardError, did_you_mean
from cepo.files.secrets import without_secrets
from cepo.files.trees import Fields
from cepo.rewards.reward_file import resolve_reward_path, run_reward_file

RewardScore = dict[str, float]
"""The numbers for one sample. `overall` is required and becomes the reward; the others are averaged for the metrics."""
RewardType = Literal["batch", "sequential"]
LARGEST_SCORE = 1e18
"""The largest accepted score: its square is finite in float32, in which advantages are computed."""
_OTHER_CONTRACTS = {
    frozenset({"completions"}): "a reward of TRL, which takes completions and returns a list of numbers",
    frozenset({"solution_str", "ground_truth"}): "a reward of verl, which takes one solution and returns a number",
    frozenset({"predict", "ground_truth"}): "a reward of EasyR1's earlier versions",
    frozenset({"predicts", "ground_truths"}): "a reward of EasyR1's earlier versions",
    frozenset({"predict_str", "ground_truth"}): "a reward of EasyR1's earlier versions",
}
"""The parameters by which other programs' rewards are recognised."""


@dataclass(frozen=True, kw_only=True)
class RewardFailure:
    """Why a sample has no score."""

    reason: str  # one line
    details: str = field(repr=False)  # the user's own frames and the exception
    breaks_contract: bool = False  # the function returned something that is not a score
    timed_out: bool = False


@dataclass(frozen=True)
class RewardOutcome:
    """The scores of one call, in the order of its inputs; all fields of failed samples are 0."""

    scores: list[RewardScore]
    num_raised: int  # samples whose function raised, broke the contract or crashed its process
    num_timed_out: int
    first_failure: RewardFailure | None = None


class ContractError(RewardError):
    """A function returned something other than scores, which will happen with every sample."""


class BatchContractError(ContractError):
    """A batch function did not return one score for each sample, so scores cannot be assigned to samples."""


def validate_score(score: object, *, sample: int, source: str) -> RewardScore:
    """Returns the score as plain floats.

    Raises `ContractError`, naming `source` (the reward function) and `sample`, if the score is not a dict with string
    keys and finite numbers, or has no `overall`.
    """
    where = f"{source} returned for sample {sample}"
    if not isinstance(score, Mapping):
        raise ContractError(
            f"{where} a {type(score).__name__}: {score!r:.200}. Return a dict such as {{'overall': 1.0}}."
        )
    entries = cast("Mapping[Any, Any]", score)
    if "overall" not in entries:
        raise ContractError(
            f"{where} a dict without 'overall', with {sorted(map(str, entries))}. Add the key 'overall'."
        )
    for name in entries:
        if not isinstance(name, str):
            raise ContractError(f"{where} the key {name!r} ({type(name).__name__}). Keys are strings.")
    # A key of a subclass of str may not unpickle in the trainer.
    return {str.__str__(name): _checked_number(name, value, where) for name, value in entries.items()}


def validate_scores(scores: object, num_expected: int, *, source: str, first_sample: int = 0) -> list[RewardScore]:
    """Checks a batch function's scores by `validate_score`; raises `BatchContractError` if their number is wrong."""
    kind = type(scores).__name__
    is_list = isinstance(scores, Sequence) and not isinstance(scores, str | bytes)
    score_list = cast("Sequence[Any]", scores) if is_list else ()
    if not is_list or len(score_list) != num_expected:
        returned = f"{len(score_list)} scores" if is_list else f"a {kind}"
        raise BatchContractError(
            f"{source} returned {returned} for {num_expected} samples. Return one per sample, in order, as a list of dicts, "
            "0 for one that cannot be judged; set REWARD_TYPE = 'sequential' in its file if it takes one sample at a time."
        )
    return [
        validate_score(score, sample=sample, source=source)
        for sample, score in enumerate(score_list, start=first_sample)
    ]


def _as_number(value: Any) -> float:
    """Returns a number without axes as a float: Python's own, a `Decimal`, or numpy's, torch's; NaN for anything else."""
    try:
        plain = value
        if getattr(value, "ndim", None) is not None:
            if value.ndim > 0:
                return math.nan
            plain = value.item()
        has_value = hasattr(plain, "__float__") or hasattr(plain, "__index__")
        return float(value) if has_value and not isinstance(plain, str) else math.nan
    except OverflowError:  # an integer too large for a float
        return math.inf
    except Exception:  # whatever an object's own conversion raises
        return math.nan


def _checked_number(name: object, value: object, where: str) -> float:
    number = _as_number(value)
    if not abs(number) <= LARGEST_SCORE:
        try:
            value_text = f"{value!r:.200}"
        except Exception as error:  # an integer with too many digits, or a custom repr
            value_text = f"<{type(error).__name__} in its repr>"
        raise ContractError(
            f"{where} {name!r} = {value_text} ({type(value).__name__}). Return a number from {-LARGEST_SCORE:g} to "
            f"{LARGEST_SCORE:g}."
        )
    return number


@dataclass(frozen=True, kw_only=True)
class LoadedReward:
    """A reward function with its keywords bound."""

    function: Callable[[Any], Any]
    reward_type: RewardType  # the file's REWARD_TYPE; "batch" if it has none
    path: Path
    function_name: str
    needs_images: bool = False  # the file's NEEDS_IMAGES: whether the samples have the row's `images` and `videos`

    @property
    def source(self) -> str:
        return f"{self.path.name}:{self.function_name}"

    def score(self, reward_inputs: Sequence[Fields], *, first_sample: int = 0) -> list[RewardScore]:
        """Calls the function in this process without a time limit, and checks what it returned.

        Errors number the samples from `first_sample` on. Raises what the function raises, and `ContractError`.
        """
        samples = [dict(reward_input) for reward_input in reward_inputs]
        is_batch = self.reward_type == "batch"
        scores = self._batch_scores(samples) if is_batch else [self.function(sample) for sample in samples]
        return validate_scores(scores, len(samples), source=self.source, first_sample=first_sample)

    def _batch_scores(self, samples: list[dict[str, Any]]) -> Any:
        try:
            return self.function(samples)
        except (TypeError, AttributeError, KeyError, IndexError):
            score = self._score_of_one(samples[0])
            if score is None:
                raise
            form = "" if isinstance(score, Mapping) else ", and return a dict such as {'overall': 1.0}"
            raise BatchContractError(
                f"{self.source} takes one sample at a time, and was called with a list of samples. Write "
                f"REWARD_TYPE = 'sequential' in {self.path}{form}."
            ) from None

    def _score_of_one(self, sample: dict[str, Any]) -> Mapping[Any, Any] | float | None:
        """Returns the score that the function gives a single sample; None if it fails, or returns something else."""
        try:
            score = self.function(sample)
        except Exception:  # it is the user's function; that it fails is the answer
            return None
        is_score = isinstance(score, Mapping | int | float)
        return cast("Mapping[Any, Any] | float", score) if is_score else None


def load_reward(spec: str, kwargs: Fields, weights: Sequence[float] | None = None) -> LoadedReward:
    """Loads the function that `spec` names, or the sum of several, separated by commas, weighted by 1 without `weights`.

    For several functions, `kwargs` maps their names to keywords. Raises `RewardError` as `load_reward_function`, and if
    `kwargs` names an unknown function.
    """
    specs = spec.split(",")
    if len(specs) == 1 and weights is None:
        return load_reward_function(spec, kwargs)
    names = function_names(spec)
    keywords_of = {names[0]: kwargs} if len(names) == 1 else kwargs
    for name, keywords in keywords_of.items():
        if name not in names or not isinstance(keywords, Mapping):
            shown_value = without_secrets(keywords, name=name)
            sections = ", ".join(f"{known_name}: {{...}}" for known_name in names)
            raise RewardError(
                f"worker.reward.reward_function_kwargs has {name}={shown_value!r}.{did_you_mean(name, names)} Of several reward "
                f"functions, give each its own section of keywords: {sections}."
            )
    parts: dict[str, LoadedReward] = {}
    for name, part_spec in zip(names, specs, strict=True):
        parts[name] = load_reward_function(part_spec, keywords_of.get(name, {}))
    return _combined(parts, weights or [1.0] * len(parts))


def _combined(parts: Mapping[str, LoadedReward], weights: Sequence[float]) -> LoadedReward:
    """Returns a weighted sum: `overall` = sum over functions f of w_f overall_f, and `<f>` = overall_f.

    Other numbers keep their names, so `accuracy` still separates right from wrong. If two functions return the same
    name, the first one's number keeps it and the later one's is renamed to `<f>.<name>`. If any function is sequential,
    the sum is, so that each sample has its own time limit.
    """

    def combine(scores: Sequence[RewardScore]) -> RewardScore:
        overalls = [score["overall"] for score in scores]
        total: RewardScore = {"overall": sum(weight * value for weight, value in zip(weights, overalls, strict=True))}
        total.update(zip(parts, overalls, strict=True))
        for part_name, score in zip(parts, scores, strict=True):
            for name, value in score.items():
                if name == "overall":
                    continue
                is_taken = name in total
                total[f"{part_name}.{name}" if is_taken else name] = value
        return total

    def score_batch(samples: Sequence[Fields]) -> list[RewardScore]:
        scores_of_parts = [part.score(samples) for part in parts.values()]
        return [combine(scores_of_sample) for scores_of_sample in zip(*scores_of_parts, strict=True)]

    def score_one(sample: Fields) -> RewardScore:
        return score_batch([sample])[0]

    first_part = next(iter(parts.values()))
    is_sequential = any(part.reward_type == "sequential" for part in parts.values())
    return dataclasses.replace(
        first_part,
        function=score_one if is_sequential else score_batch,
        reward_type="sequential" if is_sequential else "batch",
        needs_images=any(part.needs_images for part in parts.values()),
    )


def function_names(spec: str) -> list[str]:
    """Returns the functions' names in metrics: the file's name, followed by the function's if two files share it."""
    files = [resolve_reward_path(part_spec) for part_spec in spec.split(",")]
    num_files_of_stem = Counter(path.stem for path, _ in files)
    names: list[str] = []
    for path, function_name in files:
        is_shared = num_files_of_stem[path.stem] > 1
        names.append(f"{path.stem}.{function_name}" if is_shared else path.stem)
    repeated_names = [name for name, count in Counter(names).items() if count > 1]
    if repeated_names:
        raise RewardError(
            f"worker.reward.reward_function={spec} names {repeated_names[0]} twice. Name each function once, set its weight in "
            "worker.reward.reward_weights, and rename files that share a name."
        )
    return names


def load_reward_function(spec: str, kwargs: Fields) -> LoadedReward:
    """Runs the file that `spec` names and binds `kwargs` to its function; raises `RewardError` if that is impossible."""
    path, function_name, module, function = _loaded(spec)
    reward_type = getattr(module, "REWARD_TYPE", "batch")  # optional, unlike in EasyR1
    if reward_type not in ("batch", "sequential"):
        raise RewardError(f"{path}: REWARD_TYPE = {reward_type!r}; it is 'batch' or 'sequential'.")
    if inspect.isclass(function):
        raise RewardError(f"{path.name}:{function_name} is a class; write a function that calls an instance of it.")
    _check_keywords(function, kwargs, f"{path.name}:{function_name}")
    if inspect.iscoroutinefunction(inspect.unwrap(function)):
        raise RewardError(
            f"{path.name}:{function_name} is async; write a function that returns asyncio.run(...) of it."
        )
    return LoadedReward(
        function=functools.partial(function, **kwargs),
        reward_type=reward_type,
        path=path,
        function_name=function_name,
        needs_images=bool(getattr(module, "NEEDS_IMAGES", False)),
    )


def load_answer_function(spec: str) -> Callable[[str], str | None]:
    """Runs the file that `spec` names and returns its function, which finds the final answer in a response's text.

    White space around the result is removed; None and blank text mean that there is no answer. A call raises
    `ContractError` if the function returns anything else.
    """
    path, name, _, function = _loaded(spec)

    def extract(response: str) -> str | None:
        answer = function(response)
        if answer is not None and not isinstance(answer, str):
            raise ContractError(
                f"worker.reward.answer_function={path.name}:{name} returned a {type(answer).__name__}: {answer!r:.200}. "
                "Return the final answer as text, or None where a response has none."
            )
        stripped = (answer or "").strip()
        return stripped or None

    return extract


def _loaded(spec: str) -> tuple[Path, str, ModuleType, Callable[..., Any]]:
    path, function_name = resolve_reward_path(spec)
    module = run_reward_file(path)
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        known = [name for name in functions if not name.startswith("_")]
        raise RewardError(
            f"{path} has no function {function_name!r}; it has {known}.{did_you_mean(function_name, known)} "
            "Name one as path/to/file.py:function."
        )
    return path, function_name, module, function


def _check_keywords(function: Callable[..., Any], kwargs: Fields, source: str) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind([], **kwargs)
    except TypeError as error:
        parameters = list(signature.parameters)
        for names, contract in _OTHER_CONTRACTS.items():
            if names <= set(parameters):
                raise RewardError(
                    f"{source} has the parameters of {contract}. Here a reward takes a list of samples, dicts with 'response' "
                    "and 'ground_truth', and returns a list of dicts with 'overall'; write a function that calls it so: "
                    "docs/rewards.md"
                ) from error
        raise RewardError(
            f"{source} cannot be called with the samples and reward_function_kwargs {without_secrets(kwargs)!r}: {error}. "
            f"After the samples it takes {parameters[1:]}."
        ) from error
