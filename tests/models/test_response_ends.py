"""A response ends where the chat template ends an assistant's turn, whatever the model's files declare."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import json_files
import pytest
from case_files import cases
from scripted_models import declare_end
from tiny_checkpoints import FAMILIES, write_checkpoint
from tiny_checkpoints.tokens import byte_level_tokenizer
from tokenizers import AddedToken

from cepo.config.worker_schema import ModelConfig
from cepo.microgeo.world import ASSETS
from cepo.models.chat_template import ChatTemplate
from cepo.models.pretrained import read_config
from cepo.models.processing import Processing, load_processing
from cepo.models.response_end import ResponseEnd, declared_ends, response_end
from cepo.models.text_codec import TextCodec

CASES: dict[str, dict[str, Any]] = cases(__file__, "response_ends.yaml")


def template_of(case: dict[str, Any]) -> str:
    user = case.get("user", "<user>")
    opening = case.get("opening", "")
    answer = case["answer"]
    last = case.get("last", answer)
    return (
        "{% for m in messages %}"
        f"{{% if m.role == 'user' %}}{user}{{{{ m.content }}}}\n"
        f"{{% else %}}{opening}{{{{ m.content }}}}"
        f"{{% if loop.last %}}{last}{{% else %}}{answer}{{% endif %}}"
        "{% endif %}{% endfor %}"
        f"{{% if add_generation_prompt %}}{opening}{{% endif %}}"
    )


def tokenizer_of(case: dict[str, Any]) -> Any:
    padding = case.get("padding")
    tokenizer = byte_level_tokenizer((), end=None, pad=padding, unknown=None)
    for text in case["control"]:
        token = AddedToken(text, special=True, normalized=False)
        tokenizer.add_tokens([token], special_tokens=True)
    for text in case.get("added", []):
        token = AddedToken(text, special=False, normalized=False)
        tokenizer.add_tokens([token])
    return tokenizer


def texts_of(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    return tokenizer.convert_ids_to_tokens(list(token_ids))


@pytest.mark.parametrize("name", CASES)
def test_a_response_ends_as_the_template_ends_a_turn(name: str) -> None:
    case = CASES[name]
    tokenizer = tokenizer_of(case)
    declared: list[int] = tokenizer.convert_tokens_to_ids(case["declared"])
    special_tokens = tokenizer.special_tokens_map
    template = ChatTemplate(template_of(case), "it", special_tokens=special_tokens)
    end = response_end(template, tokenizer, declared, as_parts=False)
    assert texts_of(tokenizer, end.token_ids) == case["ends"]
    assert end.text == case.get("text", "")


@pytest.mark.heavy
@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_model_of_each_family_ends_its_turn(family: str, tmp_path: Path) -> None:
    """Its files declare a token that no turn ends with; the one that ends a turn is not banned."""
    folder = write_checkpoint(family, tmp_path / "model")
    published = Processing(str(folder))
    turn_end = published.eos_token_ids[0]
    added = published.tokenizer.added_tokens_decoder.values()
    controls = [token.content for token in added if token.special]
    declare_end(folder, controls[0])
    base = Processing(str(folder))
    ends = base.eos_token_ids
    assert ends[0] == turn_end
    assert controls[0] in texts_of(base.tokenizer, ends)
    assert not set(ends) & set(base.banned_token_ids)


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint("qwen3", tmp_path_factory.mktemp("base") / "model")
    declare_end(folder, "<|endoftext|>")
    return folder


def test_the_end_of_a_turn_may_be_sampled(base_model: Path) -> None:
    """It is a control token that the files do not declare, and all other control tokens are banned."""
    base = Processing(str(base_model))
    ends: list[int] = base.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert list(base.eos_token_ids) == ends
    assert not set(ends) & set(base.banned_token_ids)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_a_models_files_and_its_tokenizer_declare_ends(base_model: Path, tmp_path: Path, name: str) -> None:
    """Only a model without a generation config declares its ends in its configuration."""
    folder = shutil.copytree(base_model, tmp_path / "model")
    json_files.merge(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    (folder / "generation_config.json").rename(folder / "other.json")
    tokenizer = Processing(str(folder)).tokenizer
    ends: list[int] = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    json_files.merge(folder / "config.json", {"eos_token_id": None})
    json_files.merge(folder / name, {"eos_token_id": ends[0]})
    config = read_config(str(folder), trust_remote_code=False)
    assert list(declared_ends(str(folder), config, tokenizer)) == ends


def test_a_warning_names_the_token_and_the_declared_ones(base_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = ModelConfig(model_path=str(base_model))
    load_processing(base, chat_template=None)
    assert "ends an assistant's turn with the token '<|im_end|>'" in caplog.text
    assert (
        "the model's files declare '<|endoftext|>' as the end of a response; each of them ends a response"
        in caplog.text
    )
    caplog.clear()
    published = ModelConfig(model_path=str(ASSETS))
    load_processing(published, chat_template=None)
    levels = {record.levelno for record in caplog.records}
    assert max(levels, default=0) < logging.WARNING


def test_a_warning_names_a_text_of_several_tokens(
    base_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}[assistant]")
    processing = load_processing(ModelConfig(model_path=str(base_model)), chat_template=str(template))
    assert processing.end == ResponseEnd(processing.end.token_ids, text="</s>")
    assert (
        "data.override_chat_template ends an assistant's turn with the text '</s>', which is no single" in caplog.text
    )


def test_a_model_of_thoughts_may_write_their_tags(tmp_path: Path) -> None:
    """In some tokenizers they are control tokens, and a thought that cannot be closed has no answer."""
    processing = Processing(str(write_checkpoint("qwen3_5", tmp_path / "model")))
    thoughts: list[int] = processing.tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    assert set(thoughts) <= set(processing.tokenizer.added_tokens_decoder)
    assert not set(thoughts) & set(processing.banned_token_ids)


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ("is 7<|im_end|>", "is 7"),
        ("is 7", "is 7"),
        ("<|im_end|>", ""),
        ("is <|im_start|>7<|im_end|>", "is 7"),
    ],
)
def test_the_text_of_a_response_has_no_end(base_model: Path, response: str, text: str) -> None:
    processing = Processing(str(base_model))
    token_ids: list[int] = processing.tokenizer(response, add_special_tokens=False)["input_ids"]
    assert processing.decode(token_ids) == text
    assert processing.decode(token_ids, skip_special_tokens=False) == response


@pytest.mark.parametrize(
    ("response", "is_ended", "text"),
    [
        ("is 7</s>", True, "is 7"),
        ("is 7.</s>", True, "is 7."),
        ("is 7</s", False, "is 7</s"),
        ("</s>", True, ""),
        ("a < b > c", False, "a < b > c"),
        ("\u4f60</s>", True, "\u4f60"),
    ],
)
def test_a_text_of_several_tokens_ends_a_response(response: str, is_ended: bool, text: str) -> None:
    tokenizer = byte_level_tokenizer(("<|endoftext|>",), end="<|endoftext|>")
    codec = TextCodec(tokenizer, ResponseEnd((tokenizer.eos_token_id,), text="</s>"))
    token_ids = codec.encode_text(response)
    assert codec.is_ended_by_text(token_ids) is is_ended
    for length in range(len(token_ids)):
        assert not codec.is_ended_by_text(token_ids[:length])
    assert codec.decode(token_ids) == text
    assert "</s>" in codec.special_texts


def test_a_text_that_ends_a_response_may_take_a_token_a_byte() -> None:
    """The tokenizer has no merge of bytes above 127: the four characters take eight tokens."""
    tokenizer = byte_level_tokenizer(("<|endoftext|>",), end="<|endoftext|>")
    end = "◁/s▷"
    codec = TextCodec(tokenizer, ResponseEnd((tokenizer.eos_token_id,), text=end))
    assert len(codec.encode_text(end)) == len(end.encode()) == 8
    token_ids = codec.encode_text(f"is 7{end}")
    assert codec.is_ended_by_text(token_ids)
    assert not codec.is_ended_by_text(token_ids[:-1])
    assert codec.decode(token_ids) == "is 7"


def test_an_added_token_that_ends_is_not_in_the_text() -> None:
    tokenizer = byte_level_tokenizer((), end=None, pad=None, unknown=None)
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=False)])
    end: int = tokenizer.convert_tokens_to_ids("<|im_end|>")
    codec = TextCodec(tokenizer, [end])
    assert codec.decode([*codec.encode_text("is 7"), end]) == "is 7"
