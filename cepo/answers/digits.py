r"""Numbers in one spelling: thousands (`1,234`), `1.6e-19`, `.5`, `5.`, and mixed numbers (`13 1/3`)."""

from __future__ import annotations

import re

_SPACE = r"(?:\s|~|\\[,;:>/ ])+"
_THOUSANDS = re.compile(
    rf"(?<![\d.,])[1-9]\d{{0,2}}(?P<separator>,(?:\\!)?|\{{,\}}|{_SPACE})\d{{3}}(?:(?P=separator)\d{{3}})*(?:\.\d+)?(?!\d|,\d)"
)
_SCIENTIFIC = re.compile(r"(\d+\.\d+|\.\d+|\d+)[eE]\+?(-?)0*(\d+)(?!\d|\.\d)")
_MIXED = re.compile(rf"(?<![\d.^])(?<!\d\s)(?<!frac\s)(\d+){_SPACE}(\d+)\s*/\s*(\d+)(?!\d|\.\d)")
_POINT_BEFORE_DECIMALS = re.compile(r"(?<![\d.\\])\.(?=\d)")
_NEEDLESS_POINT = re.compile(r"(?<=\d)\.(?=\s*[^\s\d.])(?!\s*\\overline)")
REPETEND = r"\overline"
"""The command that marks the digits of a decimal that repeat."""


def joined_thousands(text: str, commas: bool) -> str:
    """Writes `1,234`, `1{,}234` and `1 234` as 1234.

    A comma joins digits only if `commas` is true and it stands outside of brackets: `(1,234)` is a pair. Digits are
    joined if the first part has one to three of them and no leading zero, and every other part exactly three.
    """

    def joined(match: re.Match[str]) -> str:
        if match["separator"].startswith(","):
            is_number = commas and not _is_within_brackets(text[: match.start()])
        else:
            is_number = not text[match.end() :].lstrip().startswith("/")  # `2 333/500` is a mixed number
        return match[0].replace(match["separator"], "") if is_number else match[0]

    return _THOUSANDS.sub(joined, text)


def _is_within_brackets(before: str) -> bool:
    opened = before.count("(") + before.count("[") + before.count(r"\{")
    closed = before.count(")") + before.count("]") + before.count(r"\}")
    return opened > closed


def with_plain_numbers(text: str, commas: bool) -> str:
    r"""Writes `1,234` as 1234, `1.6e-19` as `{1.6\cdot10^{-19}}`, `13 1/3` as `13\frac{1}{3}`, `.5` as 0.5, `5. cm` as `5 cm`."""
    text = joined_thousands(text, commas)
    text = _SCIENTIFIC.sub(r"{\1\\cdot10^{\2\3}}", text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _POINT_BEFORE_DECIMALS.sub("0.", text)
    return _NEEDLESS_POINT.sub("", text)
