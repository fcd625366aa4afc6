"""lab/gpu_dry without its wheels: the card it stands for, what it reads from PTX, and its record."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lab.gpu_dry.__main__ import checks, page_table
from lab.gpu_dry.cards import CARDS, build_library
from lab.gpu_dry.kernels import loads_of_single_entries_are_safe, shared_memory
from lab.gpu_dry.reporting import report, reported
from lab.support.tables import RESULTS

REPOSITORY = Path(__file__).resolve().parents[2]
RECORD = RESULTS / "gpu_dry.json"
TOTAL_MEMORY = """
import ctypes, sys
nvml, cuda = (ctypes.CDLL(f"{sys.argv[1]}/{name}") for name in ("libnvidia-ml.so.1", "libcuda.so.1"))
major, minor, shared, count = (ctypes.c_int() for _ in range(4))
nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
nvml.nvmlDeviceGetCudaComputeCapability(None, ctypes.byref(major), ctypes.byref(minor))
cuda.cuDeviceGetAttribute(ctypes.byref(shared), 97, 0)  # shared memory of a block by opt-in
print(count.value, major.value, minor.value, shared.value)
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the hollow GPU is compiled by gcc, which is missing here")
def test_the_hollow_gpu_is_the_card_that_the_environment_names(tmp_path: Path) -> None:
    library = build_library(tmp_path)
    for name, expected in {"H100": "2 9 0 232448", "B200": "2 10 0 232448", "RTX PRO 6000": "2 12 0 101376"}.items():
        variables = os.environ | {"CEPO_DRY_CARD": CARDS[name].described(2)}
        command = [sys.executable, "-c", TOTAL_MEMORY, str(library.parent)]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.split() == expected.split()


LOAD, STORE, BARRIER = (
    "ld.global.b64 { %rd3 }, [ %rd18 + 0 ];",
    "@%p15 st.global.v4.b32 [ %rd24 + 0 ], { %r235, %r236, %r237, %r238 };",
    "bar.sync \t0;",
)
BLOCK = "@%p3 ld.global.v4.b32 { %r26, %r27, %r28, %r29 }, [ %rd10 + 0 ];"


@pytest.mark.parametrize(
    ("lines", "safe"),
    [
        ((LOAD, BLOCK, BARRIER, BLOCK, STORE), True),
        ((BLOCK, BARRIER, LOAD, BLOCK, STORE), False),
        ((LOAD, BARRIER, LOAD, STORE), False),
        ((BLOCK, BARRIER, LOAD), True),  # nothing is overwritten
    ],
)
def test_entries_are_read_before_a_barrier_before_the_stores(lines: tuple[str, ...], safe: bool) -> None:
    assert loads_of_single_entries_are_safe("\n".join(lines)) is safe


def test_a_kernels_shared_memory_is_that_of_its_largest_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
        (tmp_path / name).mkdir()
    for number, (kernel, size) in enumerate((("attend", 100), ("attend", 300), ("other", 8))):
        (tmp_path / "TRITON_CACHE_DIR" / f"{number}.json").write_text(json.dumps({"name": kernel, "shared": size}))
    (tmp_path / "TORCHINDUCTOR_CACHE_DIR" / "group.json").write_text('{"child_paths": {}}')
    assert shared_memory() == {"attend": 300, "other": 8}


def test_a_process_without_a_report_has_no_outcome(capsys: pytest.CaptureFixture[str]) -> None:
    report(ok=True, found="9 of 9")
    assert reported(f"a warning\n{capsys.readouterr().out}") == {"ok": True, "found": "9 of 9"}
    assert reported("Traceback\n") is None


def test_the_page_has_the_record_of_todays_checks() -> None:
    rows = json.loads(RECORD.read_text(encoding="utf-8"))["checks"]
    assert [(row["part"], row["card"], row["what"]) for row in rows] == [each.name for each in checks()]
    assert page_table(rows) in (REPOSITORY / "docs" / "gpu-dry.md").read_text(encoding="utf-8")
