"""Chooses the rollouts of a group that become references, depending only on the group, never on the batch layout."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

from cepo.algorithms.settings import NegativeConfig, PositiveConfig, ReferenceSource
from cepo.errors import ConfigError
from cepo.types import Reference, Rollout, RolloutGroup, TextReference, TokenReference, WordedReference

if TYPE_CHECKING:
    from jaxtyping import Bool
    from torch import Tensor

    from cepo.algorithms.base import RowsByView


def positive_references(group: RolloutGroup, config: PositiveConfig) -> list[Reference | None]:
    """Returns the right answer for each rollout of the group; None if it must come from a peer and none is usable.

    Raises `ConfigError`: the source is the dataset's solution, and this problem has none.
    """
    if not config.source.startswith("peer_"):
        return [_of_dataset(group, config)] * len(group.rollouts)
    ranked = _right_peers(group, config)
    references: list[Reference | None] = []
    for rollout in group.rollouts:
        peers = ranked
        if config.exclude_self:
            peers = [peer for peer in ranked if peer.index != rollout.index]
        reference: Reference | None = None
        if peers:
            reference = _from_peer(peers[0], config.source, config.num_tokens)
        references.append(reference)
    return references


def wrong_reference(group: RolloutGroup, config: NegativeConfig) -> Reference | None:
    """Returns the wrong answer for the whole group; None if no wrong rollout provides one, and `fallback` applies."""
    if config.source == "ground_truth":
        return TextReference(text=group.ground_truth)
    candidates = _strict_or_usable(group, config)
    if not candidates:
        return None
    preferred = _ranked(group, candidates, config)[0]
    return _from_peer(preferred, config.source, config.num_tokens)


def wrong_references(group: RolloutGroup, config: NegativeConfig, number: int) -> list[list[WordedReference]]:
    """Returns for each rollout up to `number` different wrong references from others, the preferred first.

    With `strict_lowest` they come from the `number` other wrong rollouts with the lowest rewards, or those of them that
    have what is to be shown.
    """
    if config.source == "ground_truth":
        same_for_all: list[WordedReference] = [TextReference(text=group.ground_truth)]
        return [same_for_all[:number]] * len(group.rollouts)
    candidates = _strict_or_usable(group, config)
    ranked = _ranked(group, candidates, config)
    references: list[list[WordedReference]] = []
    for rollout in group.rollouts:
        peers = [peer for peer in ranked if peer.index != rollout.index]
        if config.strict_lowest:
            peers = peers[:number]
        by_content: dict[object, WordedReference] = {}
        for peer in peers:
            reference = _from_peer(peer, config.source, config.num_tokens)
            if reference is None:
                continue
            # Answers of equal value count once; the first peer's spelling is shown.
            content: object = peer.answer_value
            if isinstance(reference, TokenReference):
                content = reference.token_ids
            elif content is None:
                content = reference.text
            by_content.setdefault(content, reference)
        references.append(list(by_content.values())[:number])
    return references


def wrong_views(number: int) -> tuple[str, ...]:
    """Returns the names of the views that read one wrong reference each."""
    return tuple(f"wrong_{index}" for index in range(1, number + 1))


def in_views(references: Sequence[Sequence[Reference]], views: Sequence[str]) -> dict[str, list[Reference | None]]:
    """Returns for each view the reference of that place of each rollout; None where a rollout has fewer."""
    by_view: dict[str, list[Reference | None]] = {}
    for place, view in enumerate(views):
        by_view[view] = []
        for references_of_rollout in references:
            has_place = place < len(references_of_rollout)
            by_view[view].append(references_of_rollout[place] if has_place else None)
    return by_view


def in_some_view(has_reference: RowsByView, views: Sequence[str]) -> Bool[Tensor, " B"]:
    """Returns which rows have a reference in one of the views at least."""
    rows = has_reference[views[0]]
    for view in views[1:]:
        rows = rows | has_reference[view]
    return rows


def wrong_rollouts(group: RolloutGroup) -> list[Rollout]:
    """Returns the rollouts that the verifier rejects, in generation order."""
    rejected = [rollout for rollout in group.rollouts if not rollout.correct]
    return sorted(rejected, key=lambda rollout: rollout.index)


def wrong_candidates(group: RolloutGroup, config: NegativeConfig) -> list[Rollout]:
    """Returns the wrong rollouts whose answer is, by the grader, not the right one, and that have what is to be shown."""
    candidates: list[Rollout] = []
    for rollout in wrong_rollouts(group):
        if _has_source(rollout, config.source) and not rollout.answer_equals_ground_truth:
            candidates.append(rollout)
    return candidates


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
        return TextReference(text=group.ground_truth)
    return TextReference(text=group.solution, max_tokens=config.num_tokens)


def _right_peers(group: RolloutGroup, config: PositiveConfig) -> list[Rollout]:
    """Returns the usable right rollouts, the highest reward first; ties go to the lowest generation index."""
    usable: list[Rollout] = []
    for rollout in group.rollouts:
        is_right = rollout.correct
        if config.success_threshold is not None:
            is_right = rollout.reward >= config.success_threshold
        if is_right and _has_source(rollout, config.source):
            usable.append(rollout)
    return sorted(usable, key=lambda rollout: (-rollout.reward, rollout.index))


def _ranked(group: RolloutGroup, candidates: Sequence[Rollout], config: NegativeConfig) -> list[Rollout]:
    """Sorts the preferred candidate first; ties go to the lowest generation index."""
    if config.select == "random" and not config.strict_lowest:
        return _shuffled(group, candidates)
    if config.select == "most_frequent" and not config.strict_lowest:
        return _most_frequent_first(candidates)
    return sorted(candidates, key=lambda rollout: (rollout.reward, rollout.index))


def _shuffled(group: RolloutGroup, candidates: Sequence[Rollout]) -> list[Rollout]:
    """Returns the candidates in a random order that seed, step and prompt determine."""
    generator = random.Random(f"{group.seed}/{group.step}/{group.prompt_id}")
    remaining = list(candidates)
    order: list[Rollout] = []
    while remaining:
        rollout = generator.choice(remaining)
        remaining.remove(rollout)
        order.append(rollout)
    return order


def _most_frequent_first(candidates: Sequence[Rollout]) -> list[Rollout]:
    """Sorts by how many candidates have an answer of the same value; having no answer is not a common answer."""
    values = {rollout.index: rollout.answer_value or rollout.answer for rollout in candidates}
    counts = Counter(values.values())
    counts[None] = 0
    return sorted(candidates, key=lambda rollout: (-counts[values[rollout.index]], rollout.index))


def _has_source(rollout: Rollout, source: str) -> bool:
    """Returns whether the rollout has what `source` takes: a final answer, or tokens."""
    if source == "peer_answer":
        return rollout.answer is not None
    return len(rollout.response_ids) > 0


def _from_peer(rollout: Rollout, source: str, num_tokens: int) -> WordedReference | None:
    """Returns what `source` takes of a rollout; None if it has none, which happens with `strict_lowest` alone."""
    if not _has_source(rollout, source):
        return None
    if source == "peer_answer":
        assert rollout.answer is not None, "_has_source has asked"
        return TextReference(text=rollout.answer, source_index=rollout.index)
    tokens: Any = rollout.response_ids  # torch leaves the type of tolist open
    if source == "peer_prefix":
        tokens = tokens[:num_tokens]
    elif source == "peer_suffix":
        tokens = tokens[-num_tokens:]
    token_ids: list[int] = tokens.tolist()
    return TokenReference(token_ids=tuple(token_ids), source_index=rollout.index)
