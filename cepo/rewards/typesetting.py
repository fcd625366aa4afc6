"""Drops what only typesets an answer, fonts, sizes, colours and gaps, and gives each sign one command."""

from __future__ import annotations

from collections.abc import Sequence

from cepo.rewards.tokens import Group, Node, Token, is_number, is_sign, text_of, with_space

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


def without_typesetting(nodes: Sequence[Node], upright: bool = False) -> list[Node]:
    """Drops fonts, sizes, colours and spaces, and unwraps what they were put on."""
    result: list[Node] = []
    spaced = False
    position = 0
    while position < len(nodes):
        node = nodes[position]
        position += 1
        spaced = spaced or node.spaced
        if isinstance(node, Group):
            result.append(Group(tuple(without_typesetting(node.body, upright)), spaced))
            spaced = False
            continue
        following = nodes[position] if position < len(nodes) else None
        name = node.text if node.kind == "command" else ""
        if name in _DROPPED:
            upright = upright or name in _UPRIGHT_SWITCHES
            if name in (r"\left", r"\right") and following is not None and is_sign(following, "."):
                position += 1
            spaced = True
        elif name in _DROPPED_WITH_ARGUMENT and _length_of_arguments(nodes[position:]):
            position += _length_of_arguments(nodes[position:])
            spaced = True
        elif name in _WITH_TWO_ARGUMENTS and _length_of_arguments(nodes[position:]):
            position += _length_of_arguments(nodes[position:])  # the colour; what it is put on follows as a group
        elif (name in _UPRIGHT or name in _UNWRAPPED) and isinstance(following, Group):
            position += 1
            inner = without_typesetting(following.body, upright or name in _UPRIGHT)
            if name in _UPRIGHT and inner:
                result.append(with_space(inner[0]))
                result.extend(inner[1:])
                spaced = True
            else:
                result.append(Group(tuple(inner), spaced))
                spaced = False
        elif name in _UPRIGHT or name in _UNWRAPPED:
            spaced = True
        elif name in (r"\\", r"\cr", r"\newline"):
            result.append(Token("command", r"\\", spaced))
            position += _length_of_gap(nodes[position:])
            spaced = False
        elif name in _NUMBER_SETS:
            result.extend([Token("command", r"\mathbb", spaced), Group((Token("letters", name[1:]),))])
            spaced = False
        elif name.startswith(r"\pi") and name[3:] in _BEHIND_PI:
            result.extend([Token("command", r"\pi", spaced), Token("letters", name[3:])])
            spaced = False
        else:
            result.append(Token(node.kind, _SYNONYMS.get(node.text, node.text), spaced, upright))
            spaced = False
    return result


def _length_of_arguments(nodes: Sequence[Node]) -> int:
    """Returns how many nodes an argument in braces has with the option before it: `{red}`, `[rgb]{1,0,0}`; else 0."""
    if nodes and is_sign(nodes[0], "["):
        closing = [place for place, node in enumerate(nodes) if is_sign(node, "]")]
        start = closing[0] + 1 if closing else 0
    else:
        start = 0
    return start + 1 if start < len(nodes) and isinstance(nodes[start], Group) else 0


def _length_of_gap(nodes: Sequence[Node]) -> int:
    """Returns how many nodes the gap behind a line break has: four for `[4pt]`, else none."""
    texts = [text_of(node) for node in nodes[:4]]
    is_gap = len(texts) == 4 and texts[0] == "[" and texts[3] == "]" and is_number(nodes[1])
    return 4 if is_gap and texts[2] in ("pt", "em", "ex", "mm", "cm", "in") else 0
