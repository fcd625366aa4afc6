"""Defines the shipped world with what the making of its weights needs: demonstrations and the settings of the warm start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cepo.microgeo import world
from cepo.microgeo.world import WorldKind
from lab.worlds.demonstrations import Demonstration, NoiseRates, demonstrate, right_response


@dataclass(frozen=True, kw_only=True)
class TaughtWorld(WorldKind):
    """A world whose weights are made here.

    Attributes:
        response: returns a response for the tokenizer's training; together they have all of the world's words.
        seen_words: the response's words that state what is seen; if empty, its first token does.
        warm_start: settings of the warm start.
    """

    demonstrate: Callable[[Any, int], Demonstration]
    response: Callable[[Any], str]
    seen_words: tuple[str, ...]
    warm_start: Mapping[str, Any]


SHAPES = TaughtWorld(
    **vars(world.SHAPES),
    demonstrate=lambda problem, seed: demonstrate(problem, NoiseRates(), seed=seed),
    response=right_response,
    seen_words=(),
    warm_start={},
)
