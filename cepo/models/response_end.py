"""What ends a response: what the chat template writes after an assistant's text, and the tokens that the files declare.

A model that was trained on conversations ends its answer as they end, whatever its files declare: those of base models
often declare the end of a document. Both engines and the adapters for other trainers ask here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cepo.errors import ConfigError
from cepo.models.chat_template import TAG, ChatTemplate

logger = logging.getLogger(__name__)

_CLOSING_TAGS = re.compile(r"\A(?:</(?!s>)[^\s<>|]+>\s*)+")


@dataclass(frozen=True)
class ResponseEnd:
    """What ends a response: each of the tokens, the chat template's first, and a text that takes several tokens."""

    token_ids: tuple[int, ...]
    text: str = ""  # empty if the chat template ends a turn by one token, or by nothing


def response_end(template: ChatTemplate, tokenizer: Any, declared: Sequence[int], *, as_parts: bool) -> ResponseEnd:
    """Returns what ends a response of a model whose files declare the tokens `declared`.

    `as_parts` tells whether the content of a message is a list of parts.
    """
    marker = end_marker(template.after_answer(as_parts=as_parts), tokenizer)
    if not marker:
        return ResponseEnd(tuple(declared))
    token_id = _token_of(marker, tokenizer)
    if token_id is None:
        return ResponseEnd(tuple(declared), text=marker)
    further_ids = [declared_id for declared_id in declared if declared_id != token_id]
    return ResponseEnd((token_id, *further_ids))


def end_marker(after_answer: str, tokenizer: Any) -> str:
    """Returns the token or tag with which a template ends an assistant's turn; empty if it writes none.

    `after_answer` is what it writes after an assistant's text. White space before the marker does not count, nor do
    closing tags such as `</answer>` before a token, and what follows the marker belongs to the conversation.
    """
    text = after_answer.strip()
    token = _token_at_start(text, tokenizer, tags=False)
    if token:
        return token
    for start in (_CLOSING_TAGS.sub("", text), text):
        token = _token_at_start(start, tokenizer, tags=True)
        if token:
            return token
    tag = TAG.match(text)
    return _first_control_token(text, tokenizer) if tag is None else tag[0]


def _token_at_start(text: str, tokenizer: Any, *, tags: bool) -> str:
    """Returns the longest added token with which a text begins: a control token, or with `tags` one in the form of a tag.

    Other added tokens may be words or spaces.
    """
    longest = ""
    for token in tokenizer.added_tokens_decoder.values():
        content: str = token.content
        is_marker = token.special or (tags and TAG.fullmatch(content) is not None)
        if is_marker and content.strip() and text.startswith(content) and len(content) > len(longest):
            longest = content
    return longest


def _first_control_token(text: str, tokenizer: Any) -> str:
    place_of_first = len(text)
    first = ""
    for token in tokenizer.added_tokens_decoder.values():
        place = text.find(token.content)
        if token.special and token.content.strip() and 0 <= place < place_of_first:
            place_of_first = place
            first = token.content
    return first


def _token_of(marker: str, tokenizer: Any) -> int | None:
    """Returns the token of a marker; None if its text takes several."""
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.content == marker:
            return token_id
    ids: list[int] = tokenizer(marker, add_special_tokens=False)["input_ids"]
    return ids[0] if len(ids) == 1 else None


def declared_ends(path: str, config: Any, tokenizer: Any, *, trust_remote_code: bool = False) -> tuple[int, ...]:
    """Returns the tokens that end a response by the generation config of a model, if there is one, and by the tokenizer.

    Raises `ConfigError` for what is no token.
    """
    from transformers import GenerationConfig

    try:
        declared = GenerationConfig.from_pretrained(path, trust_remote_code=trust_remote_code).eos_token_id
    except OSError:  # a checkpoint without generation_config.json
        declared = getattr(config, "eos_token_id", None)  # only some configurations declare it
    candidates = list(declared) if isinstance(declared, list) else [declared]
    candidates.append(tokenizer.eos_token_id)
    token_ids: list[int] = []
    for token_id in candidates:
        if token_id is None or token_id in token_ids:
            continue
        if type(token_id) is not int or token_id < 0:
            raise ConfigError(f"eos_token_id is {declared!r:.100}; accepted: numbers of tokens")
        token_ids.append(token_id)
    return tuple(token_ids)


SAMPLED_HERE = "each of them ends a response"
"""What follows for an engine that this package tells where a response ends."""


def warn_of_undeclared_end(
    end: ResponseEnd, declared: Sequence[int], template: str, tokenizer: Any, consequence: str
) -> None:
    """Logs a warning if a chat template, so named, ends an assistant's turn by what the model's files do not declare."""
    if end.text:
        marker = f"the text {end.text!r}, which is no single token"
    elif end.token_ids and end.token_ids[0] not in declared:
        marker = f"the token {tokenizer.convert_ids_to_tokens(end.token_ids[0])!r}"
    else:
        return
    declared_texts = ", ".join(repr(text) for text in tokenizer.convert_ids_to_tokens(list(declared)))
    logger.warning(
        "%s ends an assistant's turn with %s, and the model's files declare %s as the end of a response; %s",
        template,
        marker,
        declared_texts or "nothing",
        consequence,
    )
