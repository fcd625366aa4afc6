"""The texts of tokens, which together are the text of a response."""

from __future__ import annotations

import pytest

from cepo.microgeo.world import ASSETS
from cepo.models.processing import Processing


@pytest.fixture(scope="module")
def codec() -> Processing:
    return Processing(str(ASSETS))


@pytest.mark.parametrize("text", ["12 + 7 = 19", "  two\n\nlines ", "é 你好 🙂🙂!", "नमस्ते", "a \ufffd b", "好\ufffd"])
def test_the_texts_of_tokens_are_together_the_text(text: str, codec: Processing) -> None:
    token_ids = codec.encode_text(text)
    texts = codec.token_texts(token_ids)
    assert len(texts) == len(token_ids)
    assert "".join(texts) == text


def test_the_last_token_of_a_character_has_it(codec: Processing) -> None:
    """The toy's tokenizer has no merge of bytes above 127: each of the two characters takes three tokens."""
    assert codec.token_texts(codec.encode_text("你好")) == ["", "", "你", "", "", "好"]


def test_bytes_without_a_character_stay_where_they_are(codec: Processing) -> None:
    begin_of_character = codec.encode_text("你")[:2]
    token_ids = [*begin_of_character, *codec.encode_text("7"), *begin_of_character]
    assert codec.token_texts(token_ids) == ["", "\ufffd", "7", "", "\ufffd"]
