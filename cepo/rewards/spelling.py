r"""Gives the parts of an answer one spelling: fonts, spaces, fractions, roots, exponents, numbers and degrees.

A text becomes a tree of nodes (`cepo.rewards.tokens`), a few steps simplify the tree, and `written` turns it into text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from cepo.rewards.tokens import (
    Group,
    Node,
    Token,
    is_number,
    is_sign,
    plain_characters,
    read_nodes,
    text_of,
    with_space,
)

REPETENDS = (r"\overline", r"\bar", r"\dot")
"""Commands that mark the digits of a decimal that repeat."""
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
    r"\mleft", r"\mright", r"\hfill", r"\allowbreak", r"\ignorespaces",
}  # fmt: skip
_UPRIGHT_SWITCHES = {r"\rm", r"\sf", r"\tt", r"\bf", r"\it"}
_DROPPED_WITH_ARGUMENT = {
    r"\hspace", r"\hspace*", r"\vspace", r"\phantom", r"\hphantom", r"\vphantom", r"\color", r"\label", r"\tag", r"\tag*",
    r"\hskip", r"\kern", r"\mspace", r"\mathchoice",
}  # fmt: skip
_WITH_TWO_ARGUMENTS = {r"\textcolor", r"\colorbox", r"\scalebox", r"\raisebox", r"\href"}
_FRACTIONS = {r"\frac", r"\dfrac", r"\tfrac", r"\cfrac", r"\nicefrac", r"\sfrac", r"\flatfrac", r"\xfrac"}
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
_BEHIND_PI = {"m", "cm", "mm", "km", "in", "ft", "r", "h", "x"}
"""Letters that writers put behind `\\pi` without a space, although LaTeX reads `\\pir` as one command."""
_MATRICES = {"matrix", "pmatrix", "bmatrix", "smallmatrix", "array", "Bmatrix"}


def nodes_of(text: str, commas: bool = True) -> list[Node]:
    """Returns the simplified nodes of a text; `commas`: whether `1,234` is a number and not a list of two."""
    nodes = _without_fonts(read_nodes(plain_characters(text)))
    nodes = merged_thousands(nodes, commas)
    for step in _STEPS:
        nodes = _in_groups(step)(nodes)
    return nodes


def _in_groups(step: Callable[[list[Node]], list[Node]]) -> Callable[[list[Node]], list[Node]]:
    """Makes a step that changes a list of nodes change the lists within its groups first."""

    def everywhere(nodes: list[Node]) -> list[Node]:
        changed: list[Node] = []
        for node in nodes:
            if isinstance(node, Group):
                changed.append(Group(tuple(everywhere(list(node.body))), node.spaced))
            else:
                changed.append(node)
        return step(changed)

    return everywhere


def _without_fonts(nodes: Sequence[Node], upright: bool = False) -> list[Node]:
    """Drops fonts, sizes, colours and spaces, and unwraps what they were put on."""
    result: list[Node] = []
    spaced = False
    position = 0
    while position < len(nodes):
        node = nodes[position]
        position += 1
        spaced = spaced or node.spaced
        if isinstance(node, Group):
            result.append(Group(tuple(_without_fonts(node.body, upright)), spaced))
            spaced = False
            continue
        following = nodes[position] if position < len(nodes) else None
        name = node.text if node.kind == "command" else ""
        if name in _DROPPED:
            upright = upright or name in _UPRIGHT_SWITCHES
            if name in (r"\left", r"\right") and following is not None and is_sign(following, "."):
                position += 1
            spaced = True
        elif name in _DROPPED_WITH_ARGUMENT and isinstance(following, Group):
            position += 1
            spaced = True
        elif name in _WITH_TWO_ARGUMENTS and isinstance(following, Group):
            position += 1  # the colour; what it is put on follows as a group
        elif (name in _UPRIGHT or name in _UNWRAPPED) and isinstance(following, Group):
            position += 1
            inner = _without_fonts(following.body, upright or name in _UPRIGHT)
            if name in _UPRIGHT and inner:
                result.append(with_space(inner[0]))
                result.extend(inner[1:])
                spaced = True
            else:
                result.append(Group(tuple(inner), spaced))
                spaced = False
        elif name in _UPRIGHT or name in _UNWRAPPED:
            spaced = True
        elif name == r"\\":
            result.append(Token("command", name, spaced))
            position += _length_of_gap(nodes[position:])
            spaced = False
        elif name.startswith(r"\pi") and name[3:] in _BEHIND_PI:
            result.extend([Token("command", r"\pi", spaced), Token("letters", name[3:])])
            spaced = False
        else:
            result.append(Token(node.kind, _SYNONYMS.get(node.text, node.text), spaced, upright))
            spaced = False
    return result


def _length_of_gap(nodes: Sequence[Node]) -> int:
    """Returns how many nodes the gap behind a line break has: four for `[4pt]`, else none."""
    texts = [text_of(node) for node in nodes[:4]]
    is_gap = len(texts) == 4 and texts[0] == "[" and texts[3] == "]" and is_number(nodes[1])
    return 4 if is_gap and texts[2] in ("pt", "em", "ex", "mm", "cm", "in") else 0


def _with_fractions(nodes: list[Node]) -> list[Node]:
    r"""Writes every fraction as `\frac{a}{b}` and every root as `\sqrt{a}` or `\sqrt[n]{a}`."""
    for position, node in enumerate(nodes):
        if is_sign(node, r"\over", r"\choose"):
            command = r"\frac" if is_sign(node, r"\over") else r"\binom"
            parts = (_with_fractions(nodes[:position]), _with_fractions(nodes[position + 1 :]))
            return [Token("command", command, nodes[0].spaced), *(Group(tuple(part)) for part in parts)]
    result: list[Node] = []
    rest = list(nodes)
    while rest:
        node = rest.pop(0)
        if isinstance(node, Token) and node.kind == "command" and node.text in _FRACTIONS:
            arguments: list[Node] = []
            _take_argument(rest, arguments)
            _take_argument(rest, arguments)
            result.extend([Token("command", r"\frac", node.spaced), *arguments])
        elif is_sign(node, r"\root") and len(rest) > 2 and is_sign(rest[1], r"\of"):
            result.extend([Token("command", r"\sqrt", node.spaced), Token("sign", "["), rest[0], Token("sign", "]")])
            del rest[:2]
            _take_radicand(rest, result)
        elif is_sign(node, r"\abs") and rest and isinstance(rest[0], Group):
            inside = rest.pop(0)
            assert isinstance(inside, Group)
            result.extend([Token("sign", "|"), *inside.body, Token("sign", "|")])
        elif is_sign(node, r"\sqrt", r"\surd") or (_is_word(node, "sqrt") and rest and is_sign(rest[0], "(")):
            result.append(Token("command", r"\sqrt", node.spaced))
            _take_index(rest, result)
            _take_radicand(rest, result)
        else:
            result.append(node)
    return result


def _is_word(node: Node, *words: str) -> bool:
    return isinstance(node, Token) and node.kind == "letters" and node.text.lower() in words


def _take_argument(rest: list[Node], result: list[Node]) -> None:
    r"""Moves the argument that a command finds next: a group, one digit (`\frac12`), or one token."""
    if not rest or is_sign(rest[0], "{", "}", "["):
        return  # a brace without partner is no argument
    node = rest.pop(0)
    if isinstance(node, Group):
        result.append(with_space(node, False))
        return
    is_long = node.kind in ("number", "letters") and len(node.text) > 1
    if is_long and node.text.replace(".", "").isalnum() and "." not in node.text:
        rest.insert(0, Token(node.kind, node.text[1:], False, node.upright))
        node = Token(node.kind, node.text[0], False, node.upright)
    result.append(Group((with_space(node, False),)))


def _take_index(rest: list[Node], result: list[Node]) -> None:
    if not rest or not is_sign(rest[0], "["):
        return
    for length, node in enumerate(rest):
        if is_sign(node, "]"):
            result.extend(with_space(inner, False) for inner in rest[: length + 1])
            del rest[: length + 1]
            return


def _take_radicand(rest: list[Node], result: list[Node]) -> None:
    r"""Moves what stands under a root: a group, the parentheses of `sqrt(...)`, a number after a space, or one token."""
    if rest and is_sign(rest[0], "("):
        depth = 0
        for length, node in enumerate(rest):
            depth += is_sign(node, "(") - is_sign(node, ")")
            if depth == 0:
                result.append(Group(tuple(rest[1:length])))
                del rest[: length + 1]
                return
    if rest and is_number(rest[0]) and rest[0].spaced:
        result.append(Group((with_space(rest.pop(0), False),)))
        return
    _take_argument(rest, result)


def _with_matrices(nodes: list[Node]) -> list[Node]:
    r"""Writes every matrix in brackets as `\begin{pmatrix}...\end{pmatrix}`, whichever brackets it has."""
    result: list[Node] = []
    for node in nodes:
        previous = result[-1] if result else None
        if isinstance(node, Group) and previous is not None and is_sign(previous, r"\begin", r"\end"):
            name = written(node.body)
            result.append(Group((Token("letters", "pmatrix"),)) if name in _MATRICES else node)
        elif isinstance(node, Group) and len(result) > 1 and is_sign(result[-2], r"\begin"):
            continue  # the columns of an array
        else:
            result.append(node)
    starts = [place for place, node in enumerate(result) if is_sign(node, r"\begin")]
    is_in_brackets = is_sign(result[0], "[", "(") and is_sign(result[-1], "]", ")") if result else False
    if is_in_brackets and starts == [1] and len(result) > 3 and is_sign(result[-3], r"\end"):
        return result[1:-1]
    return result


def _with_degrees(nodes: list[Node]) -> list[Node]:
    r"""Writes every degree sign as one command, and what stands in `\ang{}` and `\SI{}{}` as a value with its unit."""
    result: list[Node] = []
    position = 0
    while position < len(nodes):
        node = nodes[position]
        following = nodes[position + 1 : position + 3]
        if is_sign(node, "^") and following and _is_degree(following[0]):
            inside = list(following[0].body)[1:] if isinstance(following[0], Group) else []
            result.append(Token("command", DEGREE, node.spaced))
            result.extend(inside)
            position += 2
        elif is_sign(node, r"\circ") and not (result and _is_letters(result[-1]) and following):
            result.append(Token("command", DEGREE, node.spaced))
            position += 1
        elif is_sign(node, r"\ang") and following and isinstance(following[0], Group):
            result.extend([following[0], Token("command", DEGREE)])
            position += 2
        elif is_sign(node, r"\SI", r"\qty") and len(following) == 2 and isinstance(following[1], Group):
            unit = [Token(part.kind, part.text, True, True) for part in following[1].body if isinstance(part, Token)]
            result.extend([following[0], *unit])
            position += 3
        else:
            result.append(node)
            position += 1
    return result


def _is_degree(node: Node) -> bool:
    r"""Returns whether a node is the raised `\circ`, `{\circ}`, `{\circ C}`, `o` or `{o}`."""
    if isinstance(node, Group):
        return bool(node.body) and (
            is_sign(node.body[0], r"\circ", DEGREE) or (len(node.body) == 1 and _is_degree(node.body[0]))
        )
    return is_sign(node, r"\circ", DEGREE) or (node.kind == "letters" and node.text == "o")


def _is_letters(node: Node) -> bool:
    return isinstance(node, Token) and node.kind == "letters"


_MULTIPLES = {
    "dozen": "12", "hundred": "100", "thousand": "1000", "lakh": "100000", "million": "1000000", "crore": "10000000",
    "billion": "1000000000", "trillion": "1000000000000",
}  # fmt: skip
_PERCENT = ("percent", "percents", "pct")


def _with_words(nodes: list[Node]) -> list[Node]:
    """Writes the words `pi`, `infinity`, `percent`, `million` and the `to` of a ratio as mathematics."""
    result: list[Node] = []
    for position, node in enumerate(nodes):
        previous = result[-1] if result else None
        following = nodes[position + 1] if position + 1 < len(nodes) else None
        if not isinstance(node, Token) or node.kind != "letters":
            result.append(node)
            continue
        word = node.text.lower()
        if word == "x" and _is_power_of_ten(nodes, position) and previous is not None and is_number(previous):
            result.append(Token("command", r"\times"))
        elif node.text in ("pi", "Pi", "PI"):
            result.append(Token("command", r"\pi", node.spaced))
        elif word == "infinity":
            result.append(Token("command", r"\infty", node.spaced))
        elif previous is not None and (word in _PERCENT or (word == "cent" and _is_word(previous, "per"))):
            if word == "cent":
                result.pop()
            result.append(Token("sign", "%"))
        elif previous is not None and word in _MULTIPLES and (is_number(previous) or isinstance(previous, Group)):
            result.extend([Token("command", r"\cdot"), Token("number", _MULTIPLES[word])])
        elif word == "to" and previous is not None and following is not None and _are_values(previous, following):
            result.append(Token("sign", ":"))
        else:
            result.append(node)
    return result


def _is_power_of_ten(nodes: list[Node], position: int) -> bool:
    """Returns whether `10^` comes after the node at `position`, so that the x of `1.6 x 10^3` is a sign."""
    behind = nodes[position + 1 : position + 3]
    return len(behind) == 2 and text_of(behind[0]) == "10" and is_sign(behind[1], "^")


def _are_values(first: Node, second: Node) -> bool:
    return all(
        isinstance(node, Group) or is_number(node) or is_sign(node, r"\sqrt", r"\pi", r"\frac")
        for node in (first, second)
    )


def merged_thousands(nodes: Sequence[Node], commas: bool) -> list[Node]:
    """Joins the digits of `1,234`, `1{,}234`, `1'234` and `1 234` to one number.

    A comma joins digits only if `commas` is true and it stands outside of brackets: `(1,234)` is a pair. Digits are
    joined if the first part has one to three of them and no leading zero, and every other part exactly three.
    """
    result: list[Node] = []
    depth = 0
    position = 0
    while position < len(nodes):
        node = nodes[position]
        if isinstance(node, Group):
            result.append(Group(tuple(merged_thousands(node.body, commas)), node.spaced))
            position += 1
            continue
        depth += is_sign(node, "(", "[", r"\{") - is_sign(node, ")", "]", r"\}")
        in_a_list = position > 0 and is_sign(nodes[position - 1], ",")
        length, text = _thousands_at(nodes, position, commas and depth <= 0 and not (in_a_list and not node.spaced))
        result.append(Token(node.kind, text, node.spaced, node.upright) if length > 1 else node)
        position += length
    return result


def _thousands_at(nodes: Sequence[Node], position: int, commas: bool) -> tuple[int, str]:
    """Returns how many nodes form the number at `position`, and its digits."""
    first = nodes[position]
    text = text_of(first)
    if not is_number(first) or not re.fullmatch(r"[1-9]\d{0,2}", text):
        return 1, text
    chosen = ""
    place = position + 1
    while True:
        separator, width = _separator_at(nodes, place, commas)
        if not separator or (chosen and separator != chosen) or "." in text:
            break
        digits = nodes[place + width]
        assert isinstance(digits, Token)
        text += digits.text
        chosen = separator
        place += width + 1
    behind = nodes[place] if place < len(nodes) else None
    is_a_fraction = chosen == " " and behind is not None and is_sign(behind, "/")
    goes_on = chosen == "," and behind is not None and is_sign(behind, ",") and _is_tight_number(nodes, place + 1)
    if is_a_fraction or goes_on:
        return 1, first.text  # type: ignore[union-attr]
    return place - position, text


def _is_tight_number(nodes: Sequence[Node], place: int) -> bool:
    return place < len(nodes) and is_number(nodes[place]) and not nodes[place].spaced


_THREE_DIGITS = re.compile(r"\d{3}(?:\.\d+)?")


def _separator_at(nodes: Sequence[Node], place: int, commas: bool) -> tuple[str, int]:
    """Returns the separator of thousands at `place` and its number of nodes: 0 for a space; or an empty text."""

    def is_part(index: int, spaced: bool) -> bool:
        if index >= len(nodes) or not is_number(nodes[index]) or nodes[index].spaced != spaced:
            return False
        return _THREE_DIGITS.fullmatch(text_of(nodes[index])) is not None

    if place >= len(nodes):
        return "", 0
    if is_part(place, spaced=True):
        return " ", 0
    node = nodes[place]
    if isinstance(node, Group):
        is_comma = len(node.body) == 1 and is_sign(node.body[0], ",")
        return ("{,}", 1) if is_comma and (is_part(place + 1, False) or is_part(place + 1, True)) else ("", 0)
    if node.spaced or not is_part(place + 1, spaced=False):
        return "", 0
    if is_sign(node, "'"):
        return "'", 1
    return (",", 1) if commas and is_sign(node, ",") else ("", 0)


def _with_numbers(nodes: list[Node]) -> list[Node]:
    r"""Writes `1.6e-19` as `1.6\cdot10^{-19}`, `.5` as `0.5`, `5.` as `5`, and `13 1/3` as `13\frac{1}{3}`."""
    result: list[Node] = []
    for position, node in enumerate(nodes):
        previous = result[-1] if result else None
        if position > 0 and _is_exponent(nodes, position - 1):
            continue  # the e of the number before
        if is_sign(node, ".") and not node.spaced and previous is not None and is_number(previous):
            following = nodes[position + 1] if position + 1 < len(nodes) else None
            if following is not None and not is_sign(following, ".", *REPETENDS) and not is_number(following):
                continue
        if not isinstance(node, Token) or node.kind != "number":
            result.append(node)
            continue
        text = node.text
        if text.startswith(".") and not (previous is not None and is_number(previous) and not node.spaced):
            text = "0" + text
        if _is_exponent(nodes, position):
            text += "e" + text_of(nodes[position + 2])
        if position > 1 and _is_exponent(nodes, position - 2):
            continue
        mantissa, _, exponent = text.lower().partition("e")
        if not exponent:
            result.append(Token("number", text, node.spaced))
            continue
        power = Group(tuple(read_nodes(exponent.removeprefix("+"))))
        parts = [
            Token("number", mantissa), Token("command", r"\cdot"), Token("number", "10"), Token("sign", "^"), power,
        ]  # fmt: skip
        if previous is not None and is_sign(previous, "/", "^", r"\div"):
            result.append(Group(tuple(parts), node.spaced))
        else:
            result.extend([with_space(parts[0], node.spaced), *parts[1:]])
    return _with_mixed_numbers(result)


def _is_exponent(nodes: list[Node], position: int) -> bool:
    r"""Returns whether a number at `position` has an upright e and its exponent behind it: `3\mathrm{e}8`."""
    three = nodes[position : position + 3]
    if len(three) < 3 or not is_number(three[0]) or not is_number(three[2]):
        return False
    letter = three[1]
    return isinstance(letter, Token) and letter.upright and letter.text in ("e", "E") and text_of(three[2]).isdigit()


def _with_mixed_numbers(nodes: list[Node]) -> list[Node]:
    result: list[Node] = []
    position = 0
    while position < len(nodes):
        four = nodes[position : position + 4]
        whole = [
            node.text for node in four if isinstance(node, Token) and node.kind == "number" and node.text.isdigit()
        ]
        behind_a_point = bool(result) and is_number(result[-1])
        if len(four) == 4 and len(whole) == 3 and is_sign(four[2], "/") and four[1].spaced and not behind_a_point:
            fraction = [Token("command", r"\frac"), *(Group((Token("number", text),)) for text in whole[1:])]
            result.extend([four[0], *fraction])
            position += 4
        else:
            result.append(nodes[position])
            position += 1
    return result


def _with_exponents(nodes: list[Node]) -> list[Node]:
    """Writes `**` as `^`, and puts exponents of more than one character in braces: `x^{10}`, `x^2`."""
    result: list[Node] = []
    rest = list(nodes)
    while rest:
        node = rest.pop(0)
        if is_sign(node, "*") and rest and is_sign(rest[0], "*") and result and not rest[0].spaced:
            rest.pop(0)
            node = Token("sign", "^")
        result.append(node)
        if not is_sign(node, "^") or not rest or is_sign(rest[0], "{", "}", "^"):
            continue
        exponent: list[Node] = []
        if is_sign(rest[0], "("):
            _take_radicand(rest, exponent)
            only_group = exponent[0] if exponent else None
            exponent = list(only_group.body) if isinstance(only_group, Group) else exponent
        elif is_sign(rest[0], "-", "+") and len(rest) > 1 and is_number(rest[1]):
            exponent = [rest.pop(0), rest.pop(0)]
        else:
            argument = rest.pop(0)
            exponent = list(argument.body) if isinstance(argument, Group) else [argument]
        exponent = [with_space(part, part.spaced and place > 0) for place, part in enumerate(exponent)]
        only = exponent[0] if len(exponent) == 1 else None
        is_short = isinstance(only, Token) and (len(only.text) == 1 or only.kind in ("sign", "command"))
        result.append(exponent[0] if is_short else Group(tuple(exponent)))
    return result


def _without_braces(nodes: list[Node]) -> list[Node]:
    """Drops braces that hold nothing or one token, unless they hold the argument of a command."""
    result: list[Node] = []
    for position, node in enumerate(nodes):
        previous = nodes[position - 1] if position else None
        following = nodes[position + 1] if position + 1 < len(nodes) else None
        is_argument = previous is not None and (isinstance(previous, Group) or is_sign(previous, "^", "_", "]"))
        is_argument = is_argument or (isinstance(previous, Token) and previous.kind == "command")
        if not isinstance(node, Group) or is_argument or isinstance(following, Group):
            result.append(node)
        elif len(node.body) == 1 and isinstance(node.body[0], Token):
            result.append(with_space(node.body[0], node.spaced or _is_letters(node.body[0])))
        elif node.body:
            result.append(node)
    return result


_STEPS: tuple[Callable[[list[Node]], list[Node]], ...] = (
    _with_fractions, _with_matrices, _with_degrees, _with_numbers, _with_words, _with_exponents, _without_braces,
)  # fmt: skip


ATTACHED_SYMBOLS = {
    "mm", "cm", "dm", "km", "Km", "kg", "Kg", "ml", "mL", "cl", "cL", "dl", "dL", "ft", "in", "yd", "mi", "kN", "kJ", "kW", "kV",
    "mA", "mV", "MW", "Hz", "kHz", "MHz", "Pa", "kPa", "kB", "KB", "MB", "GB", "TB", "Wh", "kWh", "eV", "oz", "lb", "hr", "ha",
    "mol", "min", "cc",
}  # fmt: skip
"""Symbols that are units without a space before them, as in `5cm`; `2mg` may be a product of variables."""
_JOINING_WORDS = ("or", "and")


def written(nodes: Sequence[Node]) -> str:
    """Returns the text of nodes, without spaces but where it would be read differently without them."""
    text = ""
    previous: Node | None = None
    before: Node | None = None
    for node in nodes:
        inside = "{" + written(node.body) + "}" if isinstance(node, Group) else node.text
        if previous is not None and _needs_a_space(before, previous, node):
            text += " "
        text += inside
        before = previous
        previous = node
    return text


def _needs_a_space(before: Node | None, previous: Node, node: Node) -> bool:
    if isinstance(previous, Group) or isinstance(node, Group):
        return False
    if is_number(previous) and is_number(node):
        return node.spaced  # `6 0` is not 60
    if node.kind == "letters" and previous.kind == "letters":
        is_joint = previous.text in _JOINING_WORDS or node.text in _JOINING_WORDS
        return is_joint or previous.text + node.text in ATTACHED_SYMBOLS  # `h r` is not `hr`
    if previous.kind == "command" and previous.text[-1:].isalpha() and node.text[:1].isalpha():
        return True
    if before is None or not is_number(before):
        return False
    if is_sign(previous, ",") and is_number(node):
        return _THREE_DIGITS.fullmatch(node.text) is not None  # `1, 234` is not 1234
    is_e = previous.text in ("e", "E")
    return is_e and (is_number(node) or is_sign(node, "+", "-"))  # `2e -3` is not 0.002
