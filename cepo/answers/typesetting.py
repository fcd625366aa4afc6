"""Drops what only typesets an answer, fonts, sizes, colours and gaps, and gives each sign one command."""

from __future__ import annotations

from collections.abc import Sequence

from cepo.answers.cursor import NodeCursor
from cepo.answers.lexer import Group, Node, Token, is_number, is_sign, text_of, with_space

DEGREE = r"\degree"
"""The command that stands for every spelling of the degree sign."""

_UPRIGHT = {
    r"\text", r"\textrm", r"\textbf", r"\textit", r"\textsf", r"\texttt", r"\textnormal", r"\textup", r"\mathrm", r"\mathsf",
    r"\mathtt", r"\operatorname", r"\operatorname*", r"\mbox", r"\hbox", r"\unit", r"\si", r"\emph", r"\mathop",
}  # fmt: skip
_UNWRAPPED = {
    r"\mathbf", r"\mathit", r"\mathnormal", r"\boldsymbol", r"\bm", r"\pmb", r"\boxed", r"\fbox", r"\underline",
    r"\num", r"\ensuremath", r"\mathstrut", r"\uline", r"\framebox", r"\smash", r"\mathord", r"\mathbin", r"\mathrel",
}  # fmt: skip
_DROPPED = {
    r"\quad", r"\qquad", r"\thinspace", r"\medspace", r"\thickspace", r"\enspace", r"\negthinspace", r"\displaystyle",
    r"\textstyle", r"\scriptstyle", r"\scriptscriptstyle", r"\limits", r"\nolimits", r"\left", r"\right", r"\middle", r"\big",
    r"\Big", r"\bigg", r"\Bigg", r"\bigl", r"\bigr", r"\Bigl", r"\Bigr", r"\biggl", r"\biggr", r"\Biggl", r"\Biggr", r"\bf",
    r"\rm", r"\it", r"\sf", r"\tt", r"\bfseries", r"\itshape", r"\rmfamily", r"\normalfont", r"\mit", r"\cal", r"\large",
    r"\Large", r"\small", r"\normalsize", r"\huge", r"\strut", r"\null", r"\relax", r"\nobreak", r"\space", r"\centering",
    r"\mleft", r"\mright", r"\hfill", r"\allowbreak", r"\ignorespaces", r"\boldmath",
}  # fmt: skip
_UPRIGHT_SWITCHES = {r"\rm", r"\sf", r"\tt", r"\bf", r"\it"}
_DROPPED_WITH_ARGUMENT = {
    r"\hspace", r"\hspace*", r"\vspace", r"\phantom", r"\hphantom", r"\vphantom", r"\color", r"\label", r"\tag", r"\tag*",
    r"\hskip", r"\kern", r"\mspace", r"\mathchoice",
}  # fmt: skip
_WITH_TWO_ARGUMENTS = {r"\textcolor", r"\colorbox", r"\scalebox", r"\raisebox", r"\href"}
_WITH_ARGUMENTS = _DROPPED_WITH_ARGUMENT | _WITH_TWO_ARGUMENTS
_LINE_BREAKS = {r"\\", r"\cr", r"\newline"}
_UNITS_OF_GAPS = ("pt", "em", "ex", "mm", "cm", "in")
_SYNONYMS = {
    r"\le": r"\leq", r"\ge": r"\geq", r"\leqslant": r"\leq", r"\geqslant": r"\geq", r"\lt": "<", r"\gt": ">", r"\ne": r"\neq",
    r"\lvert": "|", r"\rvert": "|", r"\vert": "|", r"\mid": "|", r"\lbrace": r"\{", r"\rbrace": r"\}", r"\lbrack": "[",
    r"\rbrack": "]", r"\lparen": "(", r"\rparen": ")", r"\ast": "*", r"\%": "%", r"\colon": ":", r"\cdotp": r"\cdot",
    r"\bullet": r"\cdot", r"\thickapprox": r"\approx", r"\minus": "-", r"\plus": "+", r"\dollar": r"\$", r"\textdollar": r"\$",
    r"\pounds": "£", r"\euro": "€", r"\textdegree": DEGREE, r"\degrees": DEGREE, r"\arcdegree": DEGREE, r"\upmu": r"\mu",
    r"\ohm": r"\Omega", r"\textmu": r"\mu", r"\micro": r"\mu", r"\percent": "%", r"\setminus": r"\backslash",
    r"\varnothing": r"\emptyset", r"\ratio": ":", r"\vee": r"\lor", r"\wedge": r"\land", r"\tfrac": r"\frac",
    r"\exponentialE": "e", r"\mathrm{e}": "e", r"\to": r"\to", r"\prime": "'", r"\_": "_", r"\#": "#", r"\&": r"\&",
}  # fmt: skip
_NUMBER_SETS = {r"\R", r"\N", r"\Z", r"\Q", r"\C"}
_BEHIND_PI = {"m", "cm", "mm", "km", "in", "ft", "r", "h", "x"}
"""Letters that writers put behind `\\pi` without a space, although LaTeX reads `\\pir` as one command."""


def without_typesetting(nodes: Sequence[Node]) -> list[Node]:
    """Drops fonts, sizes, colours and spaces, and unwraps what they were put on."""
    return _Reader(nodes, upright=False).whole()


class _Reader(NodeCursor):
    """Reads nodes one after the other into a list without typesetting.

    `_spaced` is whether a space, or a command that was dropped, stands before the next node; `_upright` whether the
    letters are upright.
    """

    def __init__(self, nodes: Sequence[Node], upright: bool) -> None:
        super().__init__(nodes)
        self._upright = upright
        self._spaced = False
        self._result: list[Node] = []

    def whole(self) -> list[Node]:
        while self._place < len(self._nodes):
            node = self._nodes[self._place]
            self._place += 1
            self._spaced = self._spaced or node.spaced
            if isinstance(node, Group):
                body = _Reader(node.body, self._upright).whole()
                self._append(Group(tuple(body), self._spaced))
            elif node.kind == "command":
                self._command(node)
            else:
                self._plain(node)
        return self._result

    def _append(self, *nodes: Node) -> None:
        self._result.extend(nodes)
        self._spaced = False

    def _plain(self, node: Token) -> None:
        self._append(Token(node.kind, _SYNONYMS.get(node.text, node.text), self._spaced, self._upright))

    def _command(self, node: Token) -> None:
        name = node.text
        num_arguments = _length_of_arguments(self._nodes[self._place :]) if name in _WITH_ARGUMENTS else 0
        if name in _DROPPED:
            self._drop(name)
        elif num_arguments:
            self._place += num_arguments
            # What a colour is put on follows as a group, and is no further from what stands before.
            self._spaced = self._spaced or name in _DROPPED_WITH_ARGUMENT
        elif name in _UPRIGHT or name in _UNWRAPPED:
            self._unwrap(name)
        elif name in _LINE_BREAKS:
            self._append(Token("command", r"\\", self._spaced))
            self._place += _length_of_gap(self._nodes[self._place :])
        elif name in _NUMBER_SETS:
            letter = Token("letters", name[1:])
            self._append(Token("command", r"\mathbb", self._spaced), Group((letter,)))
        elif name.startswith(r"\pi") and name[3:] in _BEHIND_PI:
            self._append(Token("command", r"\pi", self._spaced), Token("letters", name[3:]))
        else:
            self._plain(node)

    def _drop(self, name: str) -> None:
        """Drops a command without argument, and of `\\left.` also the point, which stands for no bracket."""
        if name in _UPRIGHT_SWITCHES:
            self._upright = True
        if name in (r"\left", r"\right"):
            self._skip(".")
        self._spaced = True

    def _unwrap(self, name: str) -> None:
        """Replaces a font command by its argument: words where it makes letters upright, else a group."""
        argument = self._peek()
        if not isinstance(argument, Group):
            self._spaced = True
            return
        self._place += 1
        is_upright = name in _UPRIGHT
        inner = _Reader(argument.body, self._upright or is_upright).whole()
        if is_upright and inner:
            self._append(with_space(inner[0]), *inner[1:])
            self._spaced = True
        else:
            self._append(Group(tuple(inner), self._spaced))


def _length_of_arguments(nodes: Sequence[Node]) -> int:
    """Returns how many nodes an argument in braces has with the option before it: `{red}`, `[rgb]{1,0,0}`; else 0."""
    start = 0
    if nodes and is_sign(nodes[0], "["):
        closing = [place for place, node in enumerate(nodes) if is_sign(node, "]")]
        start = closing[0] + 1 if closing else 0
    has_argument = start < len(nodes) and isinstance(nodes[start], Group)
    return start + 1 if has_argument else 0


def _length_of_gap(nodes: Sequence[Node]) -> int:
    """Returns how many nodes the gap behind a line break has: four for `[4pt]`, else none."""
    texts = [text_of(node) for node in nodes[:4]]
    is_gap = len(texts) == 4 and texts[0] == "[" and texts[3] == "]" and is_number(nodes[1])
    return 4 if is_gap and texts[2] in _UNITS_OF_GAPS else 0
