"""Encodes and decodes plain text with a model's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cepo.errors import ConfigError
from cepo.models.response_end import ResponseEnd

IMAGE_MARK = "<image>"
VIDEO_MARK = "<video>"
"""The marks that stand for an image or a video in a dataset's text, as in EasyR1."""
MARKS = (IMAGE_MARK, VIDEO_MARK)


_INCOMPLETE = "\ufffd"
"""What a tokenizer decodes the bytes of an incomplete character to."""


class TextCodec:
    """Encodes plain text, which never becomes a special token, and decodes tokens.

    `end` is what ends a response. `vocabulary_size` is the number of the model's embeddings, None if it is not known;
    `name` is the model's in errors.
    """

    def __init__(
        self,
        tokenizer: Any,
        end: ResponseEnd | Sequence[int],
        *,
        vocabulary_size: int | None = None,
        name: str = "",
    ) -> None:
        self.tokenizer = tokenizer
        self.end = end if isinstance(end, ResponseEnd) else ResponseEnd(tuple(end))
        self._vocabulary_size = vocabulary_size
        self._name = name

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.end.token_ids

    @property
    def special_texts(self) -> tuple[str, ...]:
        """The texts that a reference may not contain: every added token, the dataset's marks, and an end of responses."""
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values()]
        ends = [self.end.text] if self.end.text else []
        return (*added, *MARKS, *ends)

    def is_ended_by_text(self, token_ids: Sequence[int]) -> bool:
        """Returns whether the last of the tokens completes the text that ends a response."""
        if not self.end.text:
            return False
        longest = len(self.end.text.encode())  # no token has less than a byte of it
        return self.end.text in self.decode_plainly(token_ids[-longest:])

    def encode_text(self, text: str) -> list[int]:
        """Tokenises plain text without special tokens. A lone surrogate, which no tokenizer accepts, becomes `?`.

        Raises `ConfigError` if a token has no row in the model's embeddings.
        """
        if not text:
            return []
        token_ids = self.tokenizer(encodable(text), add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return self.in_vocabulary(token_ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of a response's tokens, by default without control tokens and without what ended it."""
        if not skip_special_tokens:
            return self.decode_plainly(token_ids)
        if len(token_ids) and token_ids[-1] in self.eos_token_ids:  # it need not be a control token
            token_ids = token_ids[:-1]
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if self.is_ended_by_text(token_ids):
            text, _, _ = text.rpartition(self.end.text)
        return text

    def decode_plainly(self, token_ids: Sequence[int]) -> str:
        """Returns the text of all tokens, control tokens included."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text that each token adds, for heat maps of credit.

        Of tokens that share a character, such as one of Chinese, the last has it, and the others have no text.
        """
        texts_alone: dict[int, str] = {}  # a response repeats most of its tokens
        texts = [""] * len(token_ids)
        parts: list[int] = []  # tokens whose last character is incomplete
        for place, token in enumerate(token_ids):
            if token not in texts_alone:
                texts_alone[token] = self.decode_plainly([token])
            text = texts_alone[token]
            if _INCOMPLETE not in text:
                if parts:  # no character: an undecodable sequence of bytes
                    texts[place - 1] = self.decode_plainly(parts)
                parts = []
                texts[place] = text
                continue
            parts.append(token)
            together = self.decode_plainly(parts)
            if _INCOMPLETE not in together:
                texts[place] = together
                parts = []
        if parts:
            texts[-1] = self.decode_plainly(parts)
        return texts

    def in_vocabulary(self, token_ids: list[int]) -> list[int]:
        """Returns the tokens; raises `ConfigError` if one has no row in the model's embeddings."""
        largest = max(token_ids, default=0)
        if self._vocabulary_size is not None and largest >= self._vocabulary_size:
            raise ConfigError(
                f"worker.actor.model.model_path '{self._name}': the tokenizer has a token {largest:,}, and the model has "
                f"embeddings of {self._vocabulary_size:,} tokens"
            )
        return token_ids


def encodable(text: str) -> str:
    """Returns a text that a tokenizer accepts, with `?` for each lone surrogate."""
    return text.encode("utf-8", errors="replace").decode("utf-8")
