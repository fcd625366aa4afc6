"""Prepares records for trackers: validation samples with their images as images, and the credit of a pair of responses."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL.Image import Image

from cepo.data.data_uri import data_uri
from cepo.data.images import open_image
from cepo.run_folder.contrast import Contrast, clearest_pair, contrast_of
from cepo.run_folder.fragment import fragment
from cepo.run_folder.pictures import THUMBNAIL
from cepo.run_folder.trace import GroupRecord

IMAGE = "image"
"""The column of a sample with the small copy of its image, as a data URI."""
_MARKUP = str.maketrans({character: f"\\{character}" for character in "\\`*_{}[]()<>#+-.!|~&"})


@dataclass(frozen=True, kw_only=True)
class TrackedSample:
    """A validation sample: its texts by column, and the image of its problem, with a name that equal images share."""

    texts: Mapping[str, str]
    image: Image | None
    image_name: str


def tracked_samples(rows: Sequence[Mapping[str, object]]) -> list[TrackedSample]:
    """Returns validation samples with decoded images; a text in place of an image is left out."""
    images: dict[str, Image] = {}
    samples: list[TrackedSample] = []
    for row in rows:
        uri = str(row.get(IMAGE) or "")
        if uri not in images and THUMBNAIL.fullmatch(uri):
            images[uri] = _decoded(uri)
        image_name = hashlib.sha256(uri.encode()).hexdigest()
        samples.append(
            TrackedSample(
                texts={name: str(value) for name, value in row.items() if name != IMAGE},
                image=images.get(uri),
                image_name=image_name[:32],
            )
        )
    return samples


def _decoded(uri: str) -> Image:
    """Returns the image of a data URI that `run_folder.pictures.thumbnail` wrote."""
    _, _, encoded = uri.partition(",")
    content = base64.b64decode(encoded)
    return open_image(content, formats=("WEBP",)).convert("RGB")


@dataclass(frozen=True, kw_only=True)
class TrackedCredit:
    """The credit of a right and a wrong response to one problem, where both were recorded."""

    contrast: Contrast
    group: GroupRecord

    def html(self) -> str:
        """Returns both responses with coloured tokens, and the image of the problem, as HTML without scripts."""
        image = data_uri(self.group.images[0]) if self.group.images else None
        return fragment(self.contrast, image=image)

    def markdown(self) -> str:
        """Returns both responses as tables of tokens with their numbers, for trackers that show no colours."""
        parts = [
            _escaped(self.contrast.sentence),
            f"{_escaped(self.contrast.problem)} Answer: {_escaped(self.contrast.ground_truth)}",
        ]
        for side in self.contrast.sides:
            rollout = self.group.rollouts[side.place]
            parts.append(f"**{side.verdict} response, reward {side.reward:.3g}**")
            lines = ["| token | advantage | delta | weight |", "| --- | --- | --- | --- |"]
            for place, token in enumerate(side.rows[0].tokens):
                numbers: list[str] = []
                for values in (rollout.token_advantages, rollout.delta, rollout.weight):
                    numbers.append("" if values is None else f"{values[place]:.4g}")
                lines.append(f"| {_escaped(token.text)} | {' | '.join(numbers)} |")
            parts.append("\n".join(lines))
        return "\n\n".join(parts)


def tracked_credit(groups: Sequence[GroupRecord], method: str) -> TrackedCredit | None:
    """Returns the clearest pair of a step's recorded groups under the run's `method`; None without groups."""
    if not groups:
        return None
    group = max(groups, key=lambda candidate: clearest_pair(candidate.rollouts)[0])
    _, places = clearest_pair(group.rollouts)
    return TrackedCredit(contrast=contrast_of(group, places, method=method), group=group)


def _escaped(text: str) -> str:
    """Returns a text that Markdown shows as it is, in one line."""
    return text.replace("\n", " ").translate(_MARKUP)
