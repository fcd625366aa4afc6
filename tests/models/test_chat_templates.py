"""A chat template is a stranger's program: in its sandbox it reaches nothing, and its failure is an error with a message."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from cepo.errors import ConfigError, DataError
from cepo.models import processing as rendering
from cepo.models.processing import Processing

pytestmark = pytest.mark.heavy  # templates are rendered in a process of their own


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "refuses messages of the roles user: SecurityError: "),
        ("{{ 1 / 0 }}", "refuses messages of the roles user: ZeroDivisionError: "),
        ("{% for i in range(1000000000000) %}x{% endfor %}", "refuses messages of the roles user: OverflowError: "),
        ("{{ raise_exception('one role alone') }}", "refuses messages of the roles user: TemplateError: "),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "is not done"),
        ("{{ 10 ** (10 ** 9) }}", "(takes more than 2 GiB|is not done)"),
        ("{{ 'x' | center(4000000000) }}", "takes more than 2 GiB for messages of the roles user"),
        ("{% for i in range(99999) %}{{ messages }}{% endfor %}", r"makes \d,\d+,\d+ characters"),
        ("{% if %}", "does not parse"),
        ("{{ messages[0].role }}", "drops or repeats texts"),
        ("{{ messages[0].content[0].text | lower }}", "drops or repeats texts"),
        ("{{ messages[0].content[0].text | reverse }}", "drops or repeats texts"),
        ("{{ messages[0].content[0].text }}", "writes 0 placeholders for 1 <image>"),
        ("{{ messages[0].content[0].text }}<|image_pad|><|image_pad|>", "writes 2 placeholders for 1 <image>"),
        (
            "{% for part in messages[0].content | reverse %}{{ part.text }}{% endfor %}<|image_pad|>",
            "changes or reorders",
        ),
    ],
)
def test_an_unusable_or_failing_chat_template_is_named(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, template: str, what: str
) -> None:
    monkeypatch.setattr(rendering, "SECONDS", 0.5 if "is not done" in what else 60.0)
    processing = Processing(str(tiny_model_folder), chat_template=template)
    question = "What is <image>?" if "reverse %}" in template else "What is it? <image>"
    refuses = what.startswith("refuses")
    said = f"^the chat template in data.override_chat_template {what}" + ("" if refuses else ".*; name another")
    with pytest.raises(DataError if refuses else ConfigError, match=said):
        processing.template_ids(question)


def test_a_chat_template_of_the_folder_is_named(tiny_model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model_folder, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0].role }}")
    with pytest.raises(ConfigError, match=f"^the chat template of worker.actor.model.model_path '{folder}' drops"):
        Processing(str(folder)).template_ids("What is x?")
    (folder / "chat_template.jinja").write_bytes(b"\xff{{ messages }}")
    with pytest.raises(ConfigError, match=f"'{folder}': no model can be read there .*utf-8"):
        Processing(str(folder))


def test_a_killed_renderer_is_named_and_replaced(tiny_model_folder: Path) -> None:
    processing = Processing(str(tiny_model_folder))
    whole = processing.template_ids("What is x?")
    process = rendering._processes[os.getpid()]
    process.kill()
    process.wait()
    with pytest.raises(ConfigError, match="ends its process with code -9"):
        processing.template_ids("What is x?")
    assert processing.template_ids("What is x?") == whole


def test_a_pause_in_a_rendering_exceeds_no_limit(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "SECONDS", 0.2)
    processing = Processing(str(tiny_model_folder))
    whole = processing.template_ids("What is x?")
    process = rendering._processes[os.getpid()]
    process.send_signal(signal.SIGSTOP)
    threading.Timer(1.0, process.send_signal, [signal.SIGCONT]).start()
    assert processing.template_ids("What is x?") == whole
