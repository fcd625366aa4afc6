"""Writes a contrast for notebooks and trackers, as HTML without script and style sheet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cepo.report.html_page import rendered
from cepo.report.response_pair import Contrast, clearest_pair, contrast_of
from cepo.report.shown_responses import data_uri
from cepo.run_folder.trace import GroupRecord


def fragment(contrast: Contrast, *, image: str | None = None) -> str:
    """Returns the contrast as HTML; `image` is a data URI. All texts are escaped."""
    return rendered(Path(__file__).with_suffix(".html"), contrast=contrast, image=image)


def tracked_credit(groups: Sequence[GroupRecord], method: str) -> str:
    """Returns the clearest right and wrong response to a problem among a step's recorded groups, as HTML without scripts.

    Their tokens are coloured by their credit under the run's `method`.
    """
    group = max(groups, key=lambda candidate: clearest_pair(candidate.rollouts)[0])
    _, places = clearest_pair(group.rollouts)
    image = data_uri(group.images[0]) if group.images else None
    return fragment(contrast_of(group, places, method=method), image=image)
