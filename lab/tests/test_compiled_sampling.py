"""Sampling of a tiny text model by cepo and by transformers, compiled too: all sides do the same work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny_checkpoints.smollm import write_smollm_like

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"),
]


def test_all_sides_sample_equally_many_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program asserts the lengths; the compiled side is the one whose first call compiles."""
    from lab.compiled_sampling import CEPO, main

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    model = write_smollm_like(tmp_path / "model")
    out = tmp_path / "record.json"
    assert main([f"--model={model}", "--runs=2", f"--out={out}"]) == 0
    sides = json.loads(out.read_text(encoding="utf-8"))["sides"]
    assert [len(side["processor_seconds"]) for side in sides.values()] == [2, 2, 2]
    cepo, eager, compiled = sides
    assert cepo == CEPO
    first_calls = {name: side["first_call_seconds"] for name, side in sides.items()}
    assert first_calls[compiled] > 3 * first_calls[eager], first_calls
    assert list((tmp_path / "compiled").rglob("*.so")), "nothing was compiled"
