"""Shows responses on a page without a script: their tokens, coloured by their credit, their verdict, and their image."""

from __future__ import annotations

import base64
import io
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cepo.data.images import open_image, upright_rgb
from cepo.files.safe_files import damaged_as

Side = Literal["more", "less", "unmeasured"]
"""The colour: blue is `more` credit or less blame, orange is `less` credit or more blame; what is unmeasured is hatched."""
_NAMES_OF_INVISIBLE = {"\n": "↵\n", "\t": "⇥"}
_INVISIBLE_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
_EMPTY = "∅"
_SHOWN_AS_THEY_ARE = ("png", "jpeg")
_LARGEST_SIDE = 640


@dataclass(frozen=True, kw_only=True)
class ColouredToken:
    """A token with `percent` of the full colour of its side, and the text that appears under the pointer."""

    text: str
    side: Side
    percent: int
    help: str


@dataclass(frozen=True, kw_only=True)
class ColouredRow:
    """The tokens of one response as one method credits them; `belief` is P(right) before each token, if it is known."""

    label: str
    tokens: Sequence[ColouredToken]
    belief: Sequence[float] = ()

    def belief_points(self, width: float, height: float) -> str:
        """Returns the points of the belief's curve for SVG: x from 0 to `width`, and y from `height` for 0 to 0 for 1."""
        last = max(1, len(self.belief) - 1)
        return " ".join(
            f"{width * place / last:.1f},{height * (1 - value):.1f}" for place, value in enumerate(self.belief)
        )


@dataclass(frozen=True, kw_only=True)
class CreditedResponse:
    """A response under several credits, one row each."""

    title: str
    problem: str
    ground_truth: str
    image: str | None
    rows: Sequence[ColouredRow]


def coloured(text: str, share: float, help_text: str) -> ColouredToken:
    """Returns a token in the colour of a signed share of the full colour, positive for `more`."""
    percent = round(100 * min(abs(share), 1.0))
    side: Side = "less" if percent and share < 0 else "more"
    return ColouredToken(text=visible(text), side=side, percent=percent, help=help_text)


def unmeasured(text: str) -> ColouredToken:
    return ColouredToken(text=visible(text), side="unmeasured", percent=0, help="not measured")


def visible(text: str) -> str:
    """Names the characters that would not be seen, or would turn the text around them, by their number."""
    characters: list[str] = []
    for character in text:
        if character in _NAMES_OF_INVISIBLE:
            characters.append(_NAMES_OF_INVISIBLE[character])
        elif unicodedata.category(character) in _INVISIBLE_CATEGORIES:
            characters.append(f"⟨U+{ord(character):04X}⟩")
        else:
            characters.append(character)
    return "".join(characters) or _EMPTY


def shown_problem(text: str) -> str:
    """Returns the text of a problem without the marks of its images."""
    return visible(text.replace("<image>", "").strip())


def verdict(right: bool | None) -> str:
    return {True: "right", False: "wrong", None: "not judged"}[right]


def response_title(right: bool | None, reward: float, *, step: int | None = None) -> str:
    """Returns the heading of a response: its verdict, after which step it was sampled, and its reward."""
    mark = "✓ Right" if right else "✗ Wrong"
    at_step = "" if step is None else f", step {step}"
    return f"{mark} response{at_step}, reward {reward:.3g}"


def data_uri(content: bytes) -> str:
    """Returns an image as a data URI: PNG and JPEG as they are up to 640 pixels, all else upright, in sRGB and reduced to them.

    Raises `DataError` if it cannot be decoded.
    """
    image = open_image(content)
    kind = str(image.format).lower()
    if kind not in _SHOWN_AS_THEY_ARE or max(image.size) > _LARGEST_SIDE:
        reduced = io.BytesIO()
        with damaged_as(Path("an image of the run"), "cannot be decoded"):
            image = upright_rgb(image)
            image.thumbnail((_LARGEST_SIDE, _LARGEST_SIDE))
            image.save(reduced, format="WEBP", quality=80)
        content = reduced.getvalue()
        kind = "webp"
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
