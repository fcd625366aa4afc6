"""Chooses the rollouts of a group that become references, depending only on the group, never on the batch layout."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import get_args

from cepo.algorithms.settings import NegativeConfig, PositiveConfig, ReferenceSource
from cepo.errors import ConfigError
from cepo.types import Reference, Rollout, RolloutGroup


def positive_references(group: RolloutGroup, config: PositiveConfig) -> list[Reference | None]:
    """Returns the right answer for each rollout of the group; None if it must come from a peer and none is usable.

    Raises `ConfigError`: the source is the dataset's solution, and this problem has none.
    """
    if not config.source.startswith("peer_"):
        return [_of_dataset(group, config)] * len(group.rollouts)
    ranked = [(peer.index, _from_peer(peer, config.source, config.num_tokens)) for peer in _right_peers(group, config)]

    def first(own: Rollout) -> Reference | None:
        return next((each for index, each in ranked if not (config.exclude_self and index == own.index)), None)

    return [first(own) for own in group.rollouts]


def wrong_reference(group: RolloutGroup, config: NegativeConfig) -> Reference | None:
    """Returns the wrong answer for the whole group; None if no wrong rollout provides one, and `fallback` applies."""
    if config.source == "ground_truth":
        return Reference(text=group.ground_truth)
    candidates = _strict_or_usable(group, config)
    if not candidates:
        return None
    return _from_peer(_ranked(group, candidates, config)[0], config.source, config.num_tokens)


def wrong_references(group: RolloutGroup, config: NegativeConfig, number: int) -> list[list[Reference]]:
    """Returns for each rollout up to `number` different wrong references from others, the preferred first.

    With `strict_lowest` they come from the `number` other wrong rollouts with the lowest rewards, or those of them that
    have what is to be shown.
    """
    if config.source == "ground_truth":
        return [[Reference(text=group.ground_truth)][:number]] * len(group.rollouts)
    ranked = _ranked(group, _strict_or_usable(group, config), config)
    chosen: list[list[Reference]] = []
    for own in group.rollouts:
        others = [peer for peer in ranked if peer.index != own.index]
        different: dict[object, Reference] = {}  # answers of equal value count once
        for peer in others[:number] if config.strict_lowest else others:
            reference = _from_peer(peer, config.source, config.num_tokens)
            if reference is not None:
                different.setdefault(reference.token_ids or peer.answer_value or reference.text, reference)
        chosen.append(list(different.values())[:number])
    return chosen


def wrong_rollouts(group: RolloutGroup) -> list[Rollout]:
    """Returns the rollouts that the verifier rejects, in generation order."""
    return sorted((rollout for rollout in group.rollouts if not rollout.correct), key=lambda rollout: rollout.index)


def wrong_candidates(group: RolloutGroup, config: NegativeConfig) -> list[Rollout]:
    """Returns the wrong rollouts whose answer is, by the grader, not the right one, and that have what is to be shown."""
    wrong = wrong_rollouts(group)
    return [one for one in wrong if _has_source(one, config.source) and not one.answer_equals_ground_truth]


def _strict_or_usable(group: RolloutGroup, config: NegativeConfig) -> list[Rollout]:
    """Returns the wrong rollouts from which `config` chooses: with `strict_lowest` all of them."""
    return wrong_rollouts(group) if config.strict_lowest else wrong_candidates(group, config)


def _of_dataset(group: RolloutGroup, config: PositiveConfig) -> Reference:
    if config.source == "solution" and group.solution is None:
        raise ConfigError(
            f"positive.source is 'solution', but problem {group.prompt_id} has no worked solution. Name the dataset's "
            f"column of solutions, or choose another source: {', '.join(get_args(ReferenceSource))}"
        )
    if config.source == "ground_truth" or group.solution is None:
        return Reference(text=group.ground_truth)
    return Reference(text=group.solution, max_tokens=config.num_tokens)


def _right_peers(group: RolloutGroup, config: PositiveConfig) -> list[Rollout]:
    """Returns the usable right rollouts, the highest reward first; ties go to the lowest generation index."""
    least = config.success_threshold
    right = [each for each in group.rollouts if (each.correct if least is None else each.reward >= least)]
    usable = [rollout for rollout in right if _has_source(rollout, config.source)]
    return sorted(usable, key=lambda rollout: (-rollout.reward, rollout.index))


def _ranked(group: RolloutGroup, candidates: Sequence[Rollout], config: NegativeConfig) -> list[Rollout]:
    """Sorts the preferred candidate first; ties go to the lowest generation index."""
    if config.select == "random" and not config.strict_lowest:
        generator, left = random.Random(f"{group.seed}/{group.step}/{group.prompt_id}"), list(candidates)
        return [left.pop(left.index(generator.choice(left))) for _ in candidates]
    if config.select == "most_frequent" and not config.strict_lowest:
        values = {rollout.index: rollout.answer_value or rollout.answer for rollout in candidates}
        counts = Counter(values.values())
        del counts[None]  # having no answer is not a common answer
        return sorted(candidates, key=lambda rollout: (-counts[values[rollout.index]], rollout.index))
    return sorted(candidates, key=lambda rollout: (rollout.reward, rollout.index))


def _has_source(rollout: Rollout, source: str) -> bool:
    return rollout.answer is not None if source == "peer_answer" else bool(rollout.response_ids)


def _from_peer(rollout: Rollout, source: str, num_tokens: int) -> Reference | None:
    if not _has_source(rollout, source):
        return None  # only with `strict_lowest`
    if source == "peer_answer":
        return Reference(text=rollout.answer, source_index=rollout.index)
    kept = {"peer_prefix": slice(num_tokens), "peer_suffix": slice(-num_tokens, None)}.get(source, slice(None))
    return Reference(token_ids=rollout.response_ids[kept], source_index=rollout.index)
