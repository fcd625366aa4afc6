"""Which text each teacher is shown."""

from __future__ import annotations

from collections.abc import Sequence

from reference_trainer.settings import Problem, Response, Settings


def right_texts(problem: Problem, group: Sequence[Response], settings: Settings) -> list[str | None]:
    """The right side for each response of the group; None for no reference."""
    if settings.right_source == "ground_truth":
        return [problem.truth] * len(group)
    result: list[str | None] = []
    for own in range(len(group)):
        peers = [
            index for index, peer in enumerate(group) if peer.right and (index != own or not settings.exclude_self)
        ]
        best = max(peers, key=lambda index: (group[index].reward, -index), default=None)
        result.append(None if best is None else _shown(group[best], settings.right_source))
    return result


def wrong_text(group: Sequence[Response], settings: Settings) -> str | None:
    """The wrong side, the same for the whole group: of the wrong response with the lowest reward, the first of equals."""
    wrong = [peer for peer in group if not peer.right]
    if settings.wrong_source == "peer_answer":
        wrong = [peer for peer in wrong if peer.answer is not None]
    chosen = min(wrong, key=lambda peer: peer.reward, default=None)
    return None if chosen is None else _shown(chosen, settings.wrong_source)


def wrong_texts(group: Sequence[Response], own: int, settings: Settings) -> list[str]:
    """What the wrong teachers of one response read: one text for cepo; for rlcsd those of other responses, each once."""
    if settings.method == "cepo":
        text = wrong_text(group, settings)
        return [] if text is None else [text]
    if settings.method != "rlcsd":
        return []
    others = [peer for place, peer in enumerate(group) if place != own and not peer.right and peer.answer is not None]
    texts = [peer.answer for peer in sorted(others, key=lambda peer: peer.reward) if peer.answer is not None]
    return list(dict.fromkeys(texts))[: settings.num_wrong]


def _shown(response: Response, source: str) -> str | None:
    if source == "peer_answer":
        return response.answer
    assert source == "peer_full", source
    return " ".join(response.text.split())
