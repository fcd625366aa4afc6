"""Encodes and decodes plain text with a model's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cepo.errors import ConfigError

IMAGE_MARK = "<image>"
VIDEO_MARK = "<video>"
"""The marks that stand for an image or a video in a dataset's text, as in EasyR1."""
MARKS = (IMAGE_MARK, VIDEO_MARK)


_INCOMPLETE = "\ufffd"
"""What a tokenizer decodes the bytes of an incomplete character to."""


class TextCodec:
    """Encodes plain text, which never becomes a special token, and decodes tokens.

    `eos_token_ids` are the tokens that end a response. `vocabulary_size` is the number of the model's embeddings, None
    if it is not known; `name` is the model's in errors.
    """

    def __init__(
        self, tokenizer: Any, eos_token_ids: Sequence[int], *, vocabulary_size: int | None = None, name: str = ""
    ) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = tuple(eos_token_ids)
        self._vocabulary_size = vocabulary_size
        self._name = name

    @property
    def special_texts(self) -> tuple[str, ...]:
        """The texts that a reference may not contain: every added token and the dataset's marks."""
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values()]
        return (*added, *MARKS)

    def encode_text(self, text: str) -> list[int]:
        """Tokenises plain text without special tokens. A lone surrogate, which no tokenizer accepts, becomes `?`.

        Raises `ConfigError` if a token has no row in the model's embeddings.
        """
        if not text:
            return []
        token_ids = self.tokenizer(encodable(text), add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return self.in_vocabulary(token_ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text that each token adds, for heat maps of credit.

        Of tokens that share a character, such as one of Chinese, the last has it, and the others have no text.
        """
        texts_alone: dict[int, str] = {}  # a response repeats most of its tokens
        texts = [""] * len(token_ids)
        parts: list[int] = []  # tokens whose last character is incomplete
        for place, token in enumerate(token_ids):
            if token not in texts_alone:
                texts_alone[token] = self.decode([token], skip_special_tokens=False)
            text = texts_alone[token]
            if _INCOMPLETE not in text:
                if parts:  # no character: an undecodable sequence of bytes
                    texts[place - 1] = self.decode(parts, skip_special_tokens=False)
                parts = []
                texts[place] = text
                continue
            parts.append(token)
            together = self.decode(parts, skip_special_tokens=False)
            if _INCOMPLETE not in together:
                texts[place] = together
                parts = []
        if parts:
            texts[-1] = self.decode(parts, skip_special_tokens=False)
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
