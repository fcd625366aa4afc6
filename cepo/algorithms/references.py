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

    Raises:
        ConfigError: the source is the dataset's solution, and this problem has none.
    """
    if not (config.exclude_self and config.from_peer):
        return [_positive(group, config)] * len(group.rollouts)
    ranked = [(peer.index, _from_peer(peer, config.source, config.num_tokens)) for peer in _right_peers(group, config)]
    return [next((reference for index, reference in ranked if index != own.index), None) for own in group.rollouts]


def contrastive_references(
    group: RolloutGroup, positive: PositiveConfig, negative: NegativeConfig
) -> tuple[list[Reference | None], list[Reference | None]]:
    """Returns the right and the wrong answer for each rollout of the group.

    Without a right reference both are None: there is no evidence, hence GRPO. Without a wrong reference
    `negative.fallback` decides: `student` keeps the right one alone, `neutral` gives no evidence.
    """
    correct, wrong = positive_references(group, positive), wrong_reference(group, negative)
    has_right, has_wrong = contrastive_sides(
        [reference is not None for reference in correct], [wrong is not None] * len(correct), negative
    )
    return (
        [reference if is_shown else None for reference, is_shown in zip(correct, has_right, strict=True)],
        [wrong if is_shown else None for is_shown in has_wrong],
    )


def contrastive_sides(
    correct: Sequence[bool], wrong: Sequence[bool], negative: NegativeConfig
) -> tuple[list[bool], list[bool]]:
    """Returns for each rollout whether its right and its wrong answer are shown; see `contrastive_references`."""
    neutral = negative.fallback == "neutral"
    right = [is_right and (is_wrong or not neutral) for is_right, is_wrong in zip(correct, wrong, strict=True)]
    return right, [is_right and is_wrong for is_right, is_wrong in zip(correct, wrong, strict=True)]


def wrong_reference(group: RolloutGroup, config: NegativeConfig) -> Reference | None:
    """Returns the wrong answer for the whole group; None if no wrong rollout provides one, and `fallback` applies."""
    if config.source == "ground_truth":
        return Reference(text=group.ground_truth)
    candidates = wrong_rollouts(group) if config.strict_lowest else _usable(group, config)
    if not candidates:
        return None
    return _from_peer(_ranked(group, candidates, config)[0], config.source, config.num_tokens)


def wrong_references(group: RolloutGroup, config: NegativeConfig, number: int) -> list[list[Reference]]:
    """Returns for each rollout of the group up to `number` wrong references from other rollouts, the preferred first.

    Answers of equal value are used once, and so are equal texts.
    """
    if config.source == "ground_truth":
        return [[Reference(text=group.ground_truth)][:number]] * len(group.rollouts)
    ranked = _ranked(group, _usable(group, config), config)
    shown = [(peer, _from_peer(peer, config.source, config.num_tokens)) for peer in ranked]
    chosen: list[list[Reference]] = []
    for own in group.rollouts:
        different: dict[object, Reference] = {}
        for peer, reference in shown:
            if reference is not None and peer.index != own.index:
                different.setdefault(reference.token_ids or peer.answer_value or reference.text, reference)
        chosen.append(list(different.values())[:number])
    return chosen


def wrong_rollouts(group: RolloutGroup) -> list[Rollout]:
    """Returns the rollouts that the verifier rejects, in generation order."""
    return sorted((rollout for rollout in group.rollouts if not rollout.correct), key=lambda rollout: rollout.index)


def wrong_candidates(group: RolloutGroup) -> list[Rollout]:
    """Returns wrong rollouts whose extracted final answer is, by the grader, not equal to the ground truth."""
    return [
        rollout
        for rollout in wrong_rollouts(group)
        if rollout.answer is not None and not rollout.answer_equals_ground_truth
    ]


def _positive(group: RolloutGroup, config: PositiveConfig) -> Reference | None:
    if config.source == "ground_truth":
        return Reference(text=group.ground_truth)
    if config.source in ("solution", "solution_or_answer"):
        if group.solution is None and config.source == "solution_or_answer":
            return Reference(text=group.ground_truth)
        if group.solution is None:
            raise ConfigError(
                f"positive.source is 'solution', but problem {group.prompt_id} has no worked solution. Name the dataset's "
                f"column of solutions, or choose another source: {', '.join(get_args(ReferenceSource))}"
            )
        return Reference(text=group.solution, max_tokens=config.num_tokens)
    peers = _right_peers(group, config)
    return _from_peer(peers[0], config.source, config.num_tokens) if peers else None


def _right_peers(group: RolloutGroup, config: PositiveConfig) -> list[Rollout]:
    """Returns the usable right rollouts, the highest reward first; ties go to the lowest generation index."""
    if config.success_threshold is None:
        right = [rollout for rollout in group.rollouts if rollout.correct]
    else:
        right = [rollout for rollout in group.rollouts if rollout.reward >= config.success_threshold]
    if config.source == "peer_answer":
        right = [rollout for rollout in right if rollout.answer is not None]
    elif config.from_peer:
        right = [rollout for rollout in right if rollout.response_ids]
    return sorted(right, key=lambda rollout: (-rollout.reward, rollout.index))


def _usable(group: RolloutGroup, config: NegativeConfig) -> list[Rollout]:
    """Returns candidates for the wrong side; responses need no final answer, but must not have the right one."""
    if config.source == "peer_answer":
        return wrong_candidates(group)
    return [
        rollout for rollout in wrong_rollouts(group) if rollout.response_ids and not rollout.answer_equals_ground_truth
    ]


def _ranked(group: RolloutGroup, candidates: Sequence[Rollout], config: NegativeConfig) -> list[Rollout]:
    """Sorts the preferred candidate first; ties go to the lowest generation index, so batch order does not matter."""
    if config.select == "random" and not config.strict_lowest:
        generator, left = random.Random(f"{group.seed}/{group.step}/{group.prompt_id}"), list(candidates)
        return [left.pop(left.index(generator.choice(left))) for _ in candidates]
    if config.select == "most_frequent" and not config.strict_lowest:
        values = {rollout.index: rollout.answer_value or rollout.answer for rollout in candidates}
        counts = Counter(values.values())
        del counts[None]  # having no answer is not a common answer
        return sorted(candidates, key=lambda rollout: (-counts[values[rollout.index]], rollout.index))
    return sorted(candidates, key=lambda rollout: (rollout.reward, rollout.index))


def _from_peer(rollout: Rollout, source: str, num_tokens: int) -> Reference | None:
    if source == "peer_answer":
        return None if rollout.answer is None else Reference(text=rollout.answer, source_index=rollout.index)
    tokens = rollout.response_ids
    if source == "peer_prefix":
        tokens = tokens[:num_tokens]
    elif source == "peer_suffix":
        tokens = tokens[-num_tokens:]
    return Reference(token_ids=tokens, source_index=rollout.index) if tokens else None
