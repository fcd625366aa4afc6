"""Colours the tokens of a response by their credit, for parts of pages that are drawn without a script."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Side = Literal["more", "less", "unmeasured"]
"""The colour: blue is `more` credit or less blame, orange is `less` credit or more blame; what is unmeasured is hatched."""
_NAMES_OF_INVISIBLE = {"\n": "↵\n", "\t": "⇥"}
_INVISIBLE_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
_EMPTY = "∅"


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
