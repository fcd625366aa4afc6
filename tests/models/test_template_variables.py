"""Variables of a chat template are given in the data's settings, and every prompt is rendered with them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import json_files
import pytest
import yaml

from cepo.algorithms.settings import TeacherConfig
from cepo.config import dump_for_record, load_config
from cepo.data.prompts import ContextBuilder, Problem
from cepo.errors import ConfigError
from cepo.microgeo.world import ASSETS
from cepo.models.chat_template import ChatTemplate
from cepo.models.processing import Processing, processing_of

THINKING = """\
{%- for m in messages -%}
{%- set text = m.content if m.content is string else m.content | map(attribute='text') | join -%}
{{- '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""
"""The end of Qwen3's template: without the variable, or with true, the model thinks."""
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
PROBLEM = Problem(prompt_id="0", text="What is 3 + 4?", images=(), ground_truth="7", solution=None, columns={})


def test_a_setting_replaces_a_special_token_of_its_name() -> None:
    """A tokenizer that writes the beginning itself needs no `bos_token` in the prompt."""
    text = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    template = ChatTemplate(text, "it", special_tokens={"bos_token": "<s>"}, settings={"bos_token": ""})
    assert template.render([{"role": "user", "content": "4?"}]) == "4?"


@pytest.mark.parametrize(
    ("settings", "opening"),
    [({}, ""), ({"enable_thinking": True}, ""), ({"enable_thinking": False}, EMPTY_THOUGHT)],
)
def test_students_and_teachers_are_rendered_with_the_settings(settings: dict[str, Any], opening: str) -> None:
    processing = Processing(str(ASSETS), chat_template=THINKING, chat_template_kwargs=settings)
    contexts = ContextBuilder(processing, TeacherConfig(), max_context_length=200)
    for builder in (contexts, contexts.for_another_thread()):
        student = builder.student(PROBLEM)
        teacher = builder.teacher(PROBLEM, student, "7")
        for context in (student, teacher):
            assert processing.decode_plainly(context.token_ids).endswith(f"<|im_start|>assistant\n{opening}")
    assert processing.prefilled == opening
    assert Processing(**processing.arguments).prefilled == opening


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("enable_thinkin", r"Did you mean 'enable_thinking'\?$"),
        ("messages", "reads no such variable.$"),
        ("add_generation_prompt", "reads no such variable"),
        ("chat_template", "reads no such variable"),
    ],
)
def test_a_variable_that_the_template_does_not_read_is_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^data.chat_template_kwargs.{name}: the chat template in .* {words}"):
        Processing(str(ASSETS), chat_template=THINKING, chat_template_kwargs={name: 1})


def test_a_template_without_variables_says_so() -> None:
    with pytest.raises(ConfigError, match=r"of worker.actor.model.model_path .* reads no such variable.$"):
        Processing(str(ASSETS), chat_template_kwargs={"enable_thinking": False})


def test_the_settings_are_read_and_recorded(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(THINKING, encoding="utf-8")
    config = load_config(
        [
            "config=microgeo/grpo",
            f"worker.actor.model.model_path={ASSETS}",
            f"data.override_chat_template={template}",
            "data.chat_template_kwargs.enable_thinking=false",
        ]
    )
    assert config.data.chat_template_kwargs == {"enable_thinking": False}
    assert yaml.safe_load(dump_for_record(config))["data"]["chat_template_kwargs"] == {"enable_thinking": False}
    assert processing_of(config).prefilled == EMPTY_THOUGHT


def test_a_processor_takes_the_template_of_its_tokenizer(tmp_path: Path) -> None:
    """As in folders of base models with eyes: the template is in the tokenizer's file alone."""
    folder = shutil.copytree(ASSETS, tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    json_files.merge(folder / "tokenizer_config.json", {"chat_template": THINKING})
    processing = Processing(str(folder), chat_template_kwargs={"enable_thinking": False})
    assert processing.prefilled == EMPTY_THOUGHT
    assert processing.template_ids("What is 3 + 4?")
