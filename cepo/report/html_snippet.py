"""Writes a contrast for notebooks and trackers, as HTML without script and style sheet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cepo.report.html_page import ASSETS, rendered
from cepo.report.response_pair import Contrast, clearest_pair, contrast_of
from cepo.report.shown_responses import data_uri
from cepo.run_folder.trace import GroupRecord


def fragment(contrast: Contrast, *, image: str | None = None) -> str:
    """Returns the contrast as HTML; `image` is a data URI. All texts are escaped."""
    return rendered(ASSETS / "snippet.html", contrast=contrast, image=image)


@dataclass(frozen=True, kw_only=True)
class TrackedCredit:
    """The credit of a right and a wrong response to one problem, where both were recorded."""

    contrast: Contrast
    group: GroupRecord

    @property
    def step(self) -> int:
        return self.group.step

    def html(self) -> str:
        """Returns both responses with coloured tokens, and the image of the problem, as HTML without scripts."""
        image = data_uri(self.group.images[0]) if self.group.images else None
        return fragment(self.contrast, image=image)


def tracked_credit(groups: Sequence[GroupRecord], method: str) -> TrackedCredit | None:
    """Returns the clearest pair of a step's recorded groups under the run's `method`; None without groups."""
    if not groups:
        return None
    group = max(groups, key=lambda candidate: clearest_pair(candidate.rollouts)[0])
    _, places = clearest_pair(group.rollouts)
    return TrackedCredit(contrast=contrast_of(group, places, method=method), group=group)
