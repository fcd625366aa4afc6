"""What `lab.vllm_uses` finds in a vLLM's sources: everything in the installed one, and what a changed one lacks."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from lab.vllm_uses import USES, missing


def installed() -> Path:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    return Path(spec.origin).parent


def test_the_installed_vllm_has_all_that_is_used() -> None:
    assert missing(installed()) == []


def test_what_a_newer_vllm_lacks_is_named(tmp_path: Path) -> None:
    for file in USES:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed() / file, tmp_path / file)
    changes = {
        "lora/worker_manager.py": ("_adapter_manager", "_manager"),
        "distributed/parallel_state.py": ("_WORLD", "_world"),
        "renderers/base.py": (
            "def render_cmpl(\n        self,\n        prompts",
            "def render_cmpl(\n        self,\n        inputs",
        ),
    }
    for file, (old, new) in changes.items():
        text = (tmp_path / file).read_text(encoding="utf-8")
        assert old in text
        (tmp_path / file).write_text(text.replace(old, new), encoding="utf-8")
    (tmp_path / "logprobs.py").unlink()
    assert missing(tmp_path) == [
        "lora/worker_manager.py has no WorkerLoRAManager._adapter_manager",
        "distributed/parallel_state.py has no _WORLD",
        "renderers/base.py: BaseRenderer.render_cmpl does not accept prompts",
        "logprobs.py does not exist",
    ]
