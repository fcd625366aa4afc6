"""Reads the tokenizer of a model folder: its parts are those of the supported families, and it is tried on a text.

Native code of a tokenizer cannot be interrupted: a normalizer can make its text longer with each replacement, and a
pattern can take time that doubles with each letter. `read_tokenizer` therefore runs in `cepo.models.limited_process`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cepo.errors import DataError
from cepo.files.safe_files import read_json
from cepo.files.trees import Fields, is_list, is_mapping
from cepo.models import split_pattern

_MOST_PARTS = 12
_LONGEST_TEXT = 1_000
_MOST_TOKENS_PER_CHARACTER = 8
_MOST_TOKENS = 10_000_000
_PROBE = (
    "Find x: 3.5×√2 + ½ ≤ 10^6?\n\n\n\t<|im_end|> Länge 12345678 — 图中 🙂 "
    + "a" * 500
    + " " * 500
    + "\n" * 50
    + "1" * 500
)
"""Letters, digits, spaces and line ends in long rows, symbols, and several scripts."""

_REPLACED = (r"\s+", r" {2,}")
"""Expressions whose matches a `Replace` may replace: they match no empty text, so that a text becomes no longer."""
KINDS = {
    "normalizer": {
        "Sequence",
        "NFC",
        "NFD",
        "Lowercase",
        "Strip",
        "StripAccents",
        "Prepend",
        "Replace",
    },
    "pre_tokenizer": {
        "Sequence",
        "Split",
        "ByteLevel",
        "Digits",
        "Metaspace",
        "Punctuation",
        "Whitespace",
        "WhitespaceSplit",
    },
    "post_processor": {"Sequence", "ByteLevel", "TemplateProcessing"},
    "decoder": {"Sequence", "ByteLevel", "ByteFallback", "Fuse", "Strip", "Replace", "Metaspace"},
    "model": {"BPE"},
}
"""The kinds of parts in the tokenizers of the supported families, and others as simple that decide no more."""


def read_tokenizer(request: Fields) -> tuple[str, Any]:
    """Returns ("usable", None) for a tokenizer's file that was tried, or ("fault", what is wrong with it)."""
    from tokenizers import Tokenizer

    file = Path(request["file"])
    try:
        tree = read_json(file, dict)
        if not request["trusted"]:
            _check_parts(tree)
            _try_expressions(tree)
        _check_tokens(tree)
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        ids = tokenizer.encode(_PROBE).ids
        tokenizer.decode(ids, skip_special_tokens=False)
    except (MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a panic of native code is no Exception
        description = f"cannot be used: {error!s:.300}" if str(error) else type(error).__name__
        return "fault", description
    if not ids:
        return "fault", "makes no tokens of a text"
    if len(ids) > _MOST_TOKENS_PER_CHARACTER * len(_PROBE):
        return "fault", f"makes {len(ids):,} tokens of {len(_PROBE):,} characters"
    return "usable", None


def _check_parts(tree: Fields) -> None:
    for name, kinds in KINDS.items():
        kind_of = _kind_of_model if name == "model" else _kind_of
        parts = list(_parts(tree.get(name), kind_of))
        if len(parts) > _MOST_PARTS:
            raise DataError(f"its {name} has {len(parts)} parts; accepted: at most {_MOST_PARTS}")
        for kind, part in parts:
            if kind not in kinds:
                raise DataError(
                    f"its {name} has a part {kind[:100]!a}, which no supported family has; accepted: {', '.join(sorted(kinds))}"
                )
            _check_part(name, kind, part)
    if tree.get("model") is None:
        raise DataError("it has no model")


def _kind_of(part: Fields) -> str:
    return str(part.get("type"))


def _kind_of_model(part: Fields) -> str:
    """Returns the kind of a tokenizer's model; old files of a BPE do not say it."""
    if not part.get("type") and "merges" in part:
        return "BPE"
    return _kind_of(part)


def _parts(part: object, kind_of: Callable[[Fields], str]) -> Iterator[tuple[str, Fields]]:
    """Yields a part, and those inside a sequence, with their kinds."""
    if part is None:
        return
    if not is_mapping(part):
        raise DataError(f"a part is {str(part)[:100]!a}, not a mapping")
    yield kind_of(part), part
    for name in ("normalizers", "pretokenizers", "processors", "decoders"):
        inner_parts = part.get(name)
        if inner_parts is None:
            continue
        if not is_list(inner_parts):
            raise DataError(f"{name} is not a list")
        for inner_part in inner_parts:
            yield from _parts(inner_part, kind_of)


def _check_part(name: str, kind: str, part: Fields) -> None:
    """Refuses patterns other than those of the families, and replacements that make a text longer."""
    if kind == "BPE" and part.get("dropout") not in (None, 0, 0.0):
        raise DataError("its model has a dropout, so that a text would have other tokens each time")
    if kind in ("Split", "Replace"):
        pattern = part.get("pattern")
        if not is_mapping(pattern):
            raise DataError(f"its {name} has a {kind} without a pattern")
        _check_pattern(name, kind, pattern)
        if kind == "Replace":
            text = pattern.get("String")
            longest = len(text) if text else 1  # what an expression replaces has at least one character
            content = part.get("content", "")
            if not isinstance(content, str) or len(content) > longest:
                raise DataError(f"its {name} replaces a text by a longer one")
    for entry in ("prepend", "content", "replacement"):
        if len(str(part.get(entry, ""))) > _LONGEST_TEXT:
            raise DataError(f"its {name} has a long {entry}")


def _check_pattern(name: str, kind: str, pattern: Fields) -> None:
    """Refuses a pattern that is neither a regular expression of bounded time nor a text."""
    regex = pattern.get("Regex")
    if regex is not None:
        _check_expression(name, kind, str(regex))
    text = pattern.get("String")
    has_text = isinstance(text, str) and 0 < len(text) <= _LONGEST_TEXT
    is_complete = regex is not None or has_text
    if not is_complete or not pattern.keys() <= {"String", "Regex"}:
        raise DataError(f"its {name} has a {kind} without a pattern")


def _check_expression(name: str, kind: str, regex: str) -> None:
    """Refuses a regular expression that may take forever."""
    fault = split_pattern.fault_of(regex)
    if kind == "Replace" and regex not in _REPLACED:
        fault = f"accepted in a Replace: {' and '.join(_REPLACED)}"
    if fault is not None:
        raise DataError(
            f"its {name} has the regular expression {regex[:200]!a}, which may take forever: {fault}. If you trust the model, "
            "set worker.actor.model.trust_remote_code=true"
        )


def _try_expressions(tree: Fields) -> None:
    """Splits long rows of characters by each expression; one whose repetitions overlap is not done in time."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    for kind, part in _parts(tree.get("pre_tokenizer"), _kind_of):
        if kind != "Split":
            continue
        regex = part["pattern"].get("Regex")
        if regex is None:
            continue
        split = Split(Regex(regex), "isolated")
        for row in split_pattern.rows(regex):
            split.pre_tokenize_str(row)


def _check_tokens(tree: Fields) -> None:
    """Refuses ids of tokens that are no numbers of a vocabulary, and added tokens without a text."""
    ids: list[Any] = []
    model = tree.get("model")
    vocabulary = model.get("vocab") if is_mapping(model) else None
    if is_mapping(vocabulary):
        ids += vocabulary.values()
    added = tree.get("added_tokens") or []
    if not is_list(added) or not all(is_mapping(token) for token in added):
        raise DataError("its added_tokens are not a list of tokens")
    for token in added:
        content = token.get("content")
        has_text = isinstance(content, str) and 0 < len(content) <= _LONGEST_TEXT
        if not has_text:
            raise DataError(
                f"an added token is {str(content)[:100]!a}; accepted: texts of 1 to {_LONGEST_TEXT:,} characters"
            )
        ids.append(token.get("id"))
    if not ids or not all(type(index) is int and index >= 0 for index in ids):
        raise DataError("the numbers of its tokens are not integers from 0")
    if max(ids) >= _MOST_TOKENS:
        raise DataError(f"it has a token {max(ids):,}; accepted: numbers below {_MOST_TOKENS:,}")
