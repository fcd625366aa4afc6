"""Reads the tokenizer of a model folder: its parts are those of the supported families, and it is tried on a text.

Native code of a tokenizer cannot be interrupted: a normalizer can make its text longer with each replacement, and a
pattern can take time that doubles with each letter. `read_tokenizer` therefore runs in `cepo.models.limited_process`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cepo.errors import DataError
from cepo.files.foreign import read_json
from cepo.files.trees import Fields, is_list, is_mapping

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

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD_ENDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_CAPITALS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_SLASHED_ENDS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = frozenset(
    {
        # Qwen2, Qwen2.5, Qwen3, InternVL3, LLaVA-OneVision
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _WORD_ENDS,
        # Qwen3.5
        _CONTRACTIONS
        + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # Llama 3, Idefics3, SmolLM3, OLMo 2
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _WORD_ENDS,
        # the same with possessive quantifiers, as tiktoken has it
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        # Mistral's tekken
        rf"{_CASED}|{_CAPITALS}|\p{{N}}{_SLASHED_ENDS}",
        # Phi-4 and other tokenizers like that of GPT-4o
        rf"{_CASED}{_CONTRACTIONS}?|{_CAPITALS}{_CONTRACTIONS}?|\p{{N}}{{1,3}}{_SLASHED_ENDS}",
        # GPT-2
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # Llama 2 and others after sentencepiece
        r"\s+",
        r" {2,}",
    }
)
"""The regular expressions by which the supported families split texts."""
KINDS = {
    "normalizer": {"Sequence", "NFC", "Prepend", "Replace"},
    "pre_tokenizer": {"Sequence", "Split", "ByteLevel", "Digits", "Metaspace"},
    "post_processor": {"Sequence", "ByteLevel", "TemplateProcessing"},
    "decoder": {"Sequence", "ByteLevel", "ByteFallback", "Fuse", "Strip", "Replace", "Metaspace"},
    "model": {"BPE"},
}
"""The kinds of parts in the tokenizers of the supported families."""


def read_tokenizer(request: Fields) -> tuple[str, Any]:
    """Returns ("usable", None) for a tokenizer's file that was tried, or ("fault", what is wrong with it)."""
    from tokenizers import Tokenizer

    file = Path(request["file"])
    try:
        tree = read_json(file, dict)
        if not request["trusted"]:
            _check_parts(tree)
        _check_tokens(tree)
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        ids = tokenizer.encode(_PROBE).ids
        tokenizer.decode(ids, skip_special_tokens=False)
    except (MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a panic of native code is no Exception
        return "fault", f"cannot be used: {error!s:.300}" if str(error) else type(error).__name__
    if not ids:
        return "fault", "makes no tokens of a text"
    if len(ids) > _MOST_TOKENS_PER_CHARACTER * len(_PROBE):
        return "fault", f"makes {len(ids):,} tokens of {len(_PROBE):,} characters"
    return "usable", None


def _check_parts(tree: Fields) -> None:
    for name, kinds in KINDS.items():
        parts = list(_parts(tree.get(name), _kind_of_model if name == "model" else _kind_of))
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
    return str(part.get("type") or ("BPE" if "merges" in part else None))


def _parts(part: object, kind_of: Callable[[Fields], str]) -> Iterator[tuple[str, Fields]]:
    """Yields a part, and those inside a sequence, with their kinds."""
    if part is None:
        return
    if not is_mapping(part):
        raise DataError(f"a part is {str(part)[:100]!a}, not a mapping")
    yield kind_of(part), part
    for name in ("normalizers", "pretokenizers", "processors", "decoders"):
        inner = part.get(name)
        if inner is not None and not is_list(inner):
            raise DataError(f"{name} is not a list")
        for each in inner or ():
            yield from _parts(each, kind_of)


def _check_part(name: str, kind: str, part: Fields) -> None:
    """Refuses patterns other than those of the families, and replacements that make a text longer."""
    if kind == "BPE" and part.get("dropout") not in (None, 0, 0.0):
        raise DataError("its model has a dropout, so that a text would have other tokens each time")
    pattern = part.get("pattern")
    if kind in ("Split", "Replace"):
        if not is_mapping(pattern) or set(pattern) - {"String", "Regex"}:
            raise DataError(f"its {name} has a {kind} without a pattern")
        regex, text = pattern.get("Regex"), pattern.get("String")
        if regex is not None and regex not in PATTERNS:
            raise DataError(
                f"its {name} splits by the regular expression {str(regex)[:200]!a}, which no supported family has; some take "
                "forever. If you trust the model, set worker.actor.model.trust_remote_code=true"
            )
        if regex is None and not (isinstance(text, str) and 0 < len(text) <= _LONGEST_TEXT):
            raise DataError(f"its {name} has a {kind} without a pattern")
        content = part.get("content", "")
        if kind == "Replace" and not (isinstance(content, str) and len(content) <= len(text or " ")):
            raise DataError(f"its {name} replaces a text by a longer one")
    for entry in ("prepend", "content", "replacement"):
        if len(str(part.get(entry, ""))) > _LONGEST_TEXT:
            raise DataError(f"its {name} has a long {entry}")


def _check_tokens(tree: Fields) -> None:
    """Refuses ids of tokens that are no numbers of a vocabulary, and added tokens without a text."""
    model = tree.get("model")
    tokens = model.get("vocab") if is_mapping(model) else None
    ids = list(tokens.values()) if is_mapping(tokens) else []
    added = tree.get("added_tokens") or []
    if not is_list(added) or not all(is_mapping(token) for token in added):
        raise DataError("its added_tokens are not a list of tokens")
    for token in added:
        content = token.get("content")
        if not isinstance(content, str) or not 0 < len(content) <= _LONGEST_TEXT:
            raise DataError(
                f"an added token is {str(content)[:100]!a}; accepted: texts of 1 to {_LONGEST_TEXT:,} characters"
            )
        ids.append(token.get("id"))
    if not ids or not all(type(index) is int and index >= 0 for index in ids):
        raise DataError("the numbers of its tokens are not integers from 0")
    if max(ids) >= _MOST_TOKENS:
        raise DataError(f"it has a token {max(ids):,}; accepted: numbers below {_MOST_TOKENS:,}")
