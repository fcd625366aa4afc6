"""Combines several reward functions into a weighted sum and reports each function's reward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cepo.errors import RewardError, did_you_mean
from cepo.rewards.contract import RewardScore
from cepo.rewards.functions import LoadedReward, RewardType, load_reward_function, resolve_reward_path
from cepo.trees import Fields


@dataclass(frozen=True, kw_only=True)
class CombinedReward:
    """Computes a weighted sum: `overall` = sum over functions f of w_f overall_f, and `<f>` = overall_f.

    Other numbers keep their names, so `accuracy` still separates right from wrong. If two functions return the same
    name, the first one's number keeps it and the later one's is renamed to `<f>.<name>`.
    """

    parts: Mapping[str, LoadedReward]
    weights: Sequence[float]

    @property
    def name(self) -> str:
        """The functions' names, joined by `+`."""
        return "+".join(self.parts)

    @property
    def reward_type(self) -> RewardType:
        """`sequential` if any function is sequential, so that each sample has its own time limit; else `batch`."""
        kinds = {part.reward_type for part in self.parts.values()}
        return "sequential" if "sequential" in kinds else "batch"

    @property
    def needs_images(self) -> bool:
        """Whether any function needs the row's images."""
        return any(part.needs_images for part in self.parts.values())

    def score(self, reward_inputs: Sequence[Fields], *, first_sample: int = 0) -> list[RewardScore]:
        """Scores the inputs with all functions; see `LoadedReward.score`."""
        given = [part.score(reward_inputs, first_sample=first_sample) for part in self.parts.values()]
        return [self._sum(scores) for scores in zip(*given, strict=True)]

    def _sum(self, scores: Sequence[RewardScore]) -> RewardScore:
        pairs = zip(self.weights, scores, strict=True)
        total: RewardScore = {"overall": sum(weight * score["overall"] for weight, score in pairs)}
        total.update({name: score["overall"] for name, score in zip(self.parts, scores, strict=True)})
        for name, score in zip(self.parts, scores, strict=True):
            for key, value in score.items():
                if key != "overall":
                    total[f"{name}.{key}" if key in total else key] = value
        return total


def load_reward(spec: str, kwargs: Fields, weights: Sequence[float] | None = None) -> LoadedReward | CombinedReward:
    """Loads the function that `spec` names, or the weighted sum of several, separated by commas.

    Args:
        kwargs: keywords of the function; for several functions, a mapping from names to keywords.
        weights: one for each function; None means 1 each.

    Raises:
        RewardError: see `load_reward_function`; also if `kwargs` for several functions names an unknown one.
    """
    specs = _each(spec)
    if len(specs) == 1 and weights is None:
        return load_reward_function(spec, kwargs)
    names = function_names(spec)
    own = {names[0]: kwargs} if len(names) == 1 else kwargs
    for name, keywords in own.items():
        if name not in names or not isinstance(keywords, Mapping):
            raise RewardError(
                f"worker.reward.reward_function_kwargs has {name}={keywords!r}.{did_you_mean(name, names)} Of several reward "
                f"functions, give each its own section of keywords: {', '.join(f'{each}: {{...}}' for each in names)}."
            )
    parts = {name: load_reward_function(each, own.get(name, {})) for name, each in zip(names, specs, strict=True)}
    return CombinedReward(parts=parts, weights=weights or [1.0] * len(parts))


def function_names(spec: str) -> list[str]:
    """Returns the functions' names in metrics: the file's name, followed by the function's if two files share it.

    Raises:
        RewardError: a file does not exist, or a function is named twice.
    """
    files = [resolve_reward_path(each) for each in _each(spec)]
    often = Counter(path.stem for path, _ in files)
    names = [path.stem if often[path.stem] == 1 else f"{path.stem}.{function}" for path, function in files]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise RewardError(
            f"worker.reward.reward_function={spec} names {twice[0]} twice. Name each function once, set its weight in "
            "worker.reward.reward_weights, and rename files that share a name."
        )
    return names


def _each(spec: str) -> list[str]:
    return [each.strip() for each in spec.split(",")]
