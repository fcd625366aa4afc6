"""Checks for a GPU where there is none: scripts/gpu_check.sh with tiny shapes, and lab/gpu_dry without its wheels."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch
from tiny_checkpoints import write_checkpoint

from cepo.models.processing import Processing
from cepo.rollout.factory import MOST_BANNED_ON_GPU
from lab.engine_check import limits, run
from lab.gpu_dry.__main__ import checks, finished, is_asked, page_table
from lab.gpu_dry.cards import CARDS, build_library, report, reported
from lab.gpu_dry.checkpoint import write_model
from lab.gpu_dry.kernels import loads_of_single_entries_are_safe, shared_memory
from lab.gpu_dry.memory import COMPUTED, AllocatesLargeResults, Allocation, Operand
from lab.gpu_dry.processor_behind import described
from lab.gpu_dry.published import PUBLISHED
from lab.support.tables import RESULTS
from lab.worlds.model import build_processor
from lab.worlds.tokenizer import build_tokenizer
from testing.shapes import SHAPES, full_length_tokenizer, model_config

FIRST_PARTS = ["versions", *(["engine adapter"] if find_spec("vllm") else []), "packed rows", "two steps", "levers"]
PARTS = [
    *FIRST_PARTS,
    "tests",
    *(["engine full"] if find_spec("vllm") else []),
    "stages 2b",
    "stages small",
    "profile of the update",
]
ENGINE_STEPS = (
    "random checkpoint",
    "trainer",
    "engine start",
    "8 responses per prompt with an image",
    "log-probs of engine and trainer",
    "new weights, caches emptied",
)
"""Those that run without a GPU, for an adapter and for full weights."""
REPOSITORY = Path(__file__).resolve().parents[2]


def gpu_check(out: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The script, from another folder."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OUT", "PYTHONPATH", "CEPO_VENV") and not name.startswith("CEPO_GPU_CHECK")
    }
    environment = inherited | {"CEPO_PYTHON": sys.executable, "OUT": str(out)} | variables
    return subprocess.run(
        ["bash", str(REPOSITORY / "scripts" / "gpu_check.sh"), *arguments],
        cwd=out.parent, env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["micro", "small", "qwen3-vl-2b"])
def test_a_shapes_tokenizer_bans_few_of_its_ids(name: str, tmp_path: Path) -> None:
    """267 beyond the tokenizer's last, and 12 control tokens and 1 end token; vLLM on a GPU bans at most 1,024."""
    shape = SHAPES[name]
    tokenizer = full_length_tokenizer(shape)
    build_processor(tokenizer).save_pretrained(tmp_path)
    model_config(shape).save_pretrained(tmp_path)
    processing = Processing(str(tmp_path))
    num_unused = 0 if name == "micro" else 267
    assert len(processing.tokenizer) == shape.vocabulary - num_unused
    assert len(processing.banned_token_ids) == num_unused + 13 <= MOST_BANNED_ON_GPU
    text = "Find the area of ABC.<|im_end|> unwritten700"
    assert processing.tokenizer(text)["input_ids"] == build_tokenizer()(text)["input_ids"]


@pytest.mark.heavy
def test_on_a_cpu_all_parts_of_the_check_pass(tmp_path: Path) -> None:
    """The engine's part is among them, and the parts leave their figures."""
    arguments = ("-k", "cpu and (doctor or generation and bf16)")
    done = gpu_check(tmp_path / "out", *arguments, CEPO_GPU_CHECK_DEVICE="cpu", CEPO_GPU_CHECK_PARTS="all")
    if torch.cuda.is_available():
        assert "skipped" in done.stdout  # the tests see no GPU, and are told to run at the CPU's place
    assert done.returncode == 0, done.stdout + done.stderr
    log = (tmp_path / "out" / "log.txt").read_text(encoding="utf-8")
    assert re.findall(r"^-- (.*): exit code 0 ", log, re.MULTILINE) == PARTS
    assert "2 passed" in log  # of the part `tests`
    (mean,) = re.findall(r"bf16 sampled against scored in nats: mean, 99th, largest: [\[(]([^,]*),", log)
    assert 0 < float(mean) < 1e-2
    for name in ("2b", "small"):
        found = json.loads((tmp_path / "out" / f"stages_{name}.json").read_text(encoding="utf-8"))
        assert found["still_packed"]
        assert found["largest_gap_nats"] < 1e-4
        assert set(found["stages"]) == {
            "generate", "score student", "teachers", "score all", "teachers (difference)", "update",
        }  # fmt: skip
    profiled = json.loads((tmp_path / "out" / "profile.json").read_text(encoding="utf-8"))["profile"]
    assert profiled["update"]
    if "engine full" in PARTS:
        steps = [line.partition(":")[0] for line in log.splitlines() if line.startswith(("ok  ", "FAIL"))]
        assert steps == [f"ok   {name}" for name in ENGINE_STEPS * 2]
        assert log.count("engine check: passed") == 2
    table = [line for line in log.splitlines() if line.startswith("| ")]
    assert "not measured" not in "".join(table)
    for what in (
        "training: timing_s/step",
        "training: timing_s/generate",
        "levers: compiled, budget, nothing recomputed",
    ):
        assert any(line.startswith(f"| {what}") for line in table), what
    assert "0 parts failed (none)" in done.stdout.splitlines()[-1]


def test_failing_parts_exit_1_and_stop_no_other_part(tmp_path: Path) -> None:
    done = gpu_check(tmp_path / "out", CEPO_GPU_CHECK_DEVICE="cpu", CEPO_GPU_CHECK_SECONDS="1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.findall(r"^-- (.*): exit code 124 ", done.stdout, re.MULTILINE) == FIRST_PARTS
    assert "| steps | not measured |" in done.stdout.splitlines()
    assert f"{len(FIRST_PARTS)} parts failed ({' '.join(FIRST_PARTS)})" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("distribution", "is_taken"),
    [(None, True), ("transformers-4.57.0", False), ("torch-2.4.0", False), ("peft-0.9.0", False)],
)
def test_a_systems_python_is_taken_only_with_versions_that_serve(
    tmp_path: Path, distribution: str | None, is_taken: bool
) -> None:
    """With others the script would install, for which the disk of this test has no room."""
    programs, packages, environment = tmp_path / "programs", tmp_path / "packages", tmp_path / "venv" / "bin"
    for folder in (programs, packages, environment):
        folder.mkdir(parents=True)
    if distribution is not None:
        name, _, version = distribution.partition("-")
        record = packages / f"{distribution}.dist-info" / "METADATA"
        record.parent.mkdir()
        record.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    texts = {
        programs / "python3": f'PYTHONPATH="{packages}:$PYTHONPATH" exec "{sys.executable}" "$@"',
        programs / "df": "printf 'head\\n- - - 0\\n'",
        environment / "python": "exit 1",
    }
    for file, text in texts.items():
        file.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        file.chmod(0o755)
    done = gpu_check(
        tmp_path / "out",
        CEPO_PYTHON="",
        CEPO_VENV=str(tmp_path / "venv"),
        PYTHON=sys.executable,
        PATH=f"{programs}{os.pathsep}{os.environ['PATH']}",
        CEPO_GPU_CHECK_DEVICE="cpu",
        CEPO_GPU_CHECK_SECONDS="1",
    )
    assert done.returncode == 1
    assert ("== versions" in done.stdout) == is_taken, done.stdout + done.stderr
    assert ("has 0 GB free" in done.stderr) == (not is_taken)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so that the script would run")
@pytest.mark.heavy
def test_without_a_gpu_the_check_ends_at_once_with_2(tmp_path: Path) -> None:
    """A device that it does not know is refused."""
    done = gpu_check(tmp_path / "out")
    assert done.returncode == 2
    assert "torch sees no GPU" in done.stdout
    refused = gpu_check(tmp_path / "out", CEPO_GPU_CHECK_DEVICE="tpu")
    assert refused.returncode == 1
    assert "accepted: cuda and cpu" in refused.stderr


def test_the_engine_check_goes_on_after_a_failed_step_that_no_later_one_needs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It shows each failed step's error. A gap above its limit once kept sleeping and new weights from being checked."""

    def fail() -> dict[str, float]:
        raise RuntimeError("no such kernel")

    def works() -> dict[str, float]:
        return {"GB": 1.5}

    done = run([("engine start", works), ("log-probs", fail), ("sleep", works), ("new trainer", fail), ("wake", works)])
    found = [(step.name, step.error is None) for step in done]
    assert found == [("engine start", True), ("log-probs", False), ("sleep", True), ("new trainer", False)]
    page = capsys.readouterr().out
    assert page.startswith("ok   engine start: 0.0 s, GB 1.5\nFAIL log-probs: 0.0 s\n")
    assert "RuntimeError: no such kernel\nok   sleep: 0.0 s, GB 1.5\n" in page


def test_the_engine_checks_limits_follow_the_trainers_own_rounding() -> None:
    """On an H200 the engine was 0.0178 nats from a trainer that is 0.019 from itself, and a limit of 0.01 failed it."""
    assert limits({"mean": 0.019, "99th percentile": 0.06}) == {"mean": 0.038, "99th percentile": 0.12}
    assert limits({"mean": 0.0, "99th percentile": 1e-4}) == {"mean": 1e-2, "99th percentile": 5e-2}


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
    for name, expected in {
        "H100": "2 9 0 232448",
        "B200": "2 10 0 232448",
        "RTX PRO 6000": "2 12 0 101376",
        "RTX 4090": "2 8 9 101376",
    }.items():
        variables = os.environ | {"CEPO_DRY_CARD": CARDS[name].described(2)}
        command = [sys.executable, "-c", TOTAL_MEMORY, str(library.parent)]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.split() == expected.split()


LOOK_UP = """
import ctypes, sys
hollow = ctypes.CDLL(sys.argv[1])
found = ctypes.c_void_p()
names = (b"cuDeviceGetCount", b"cuMemGetAllocationGranularity", b"cuNoSuchFunction")
codes = [hollow.cuGetProcAddress_v2(name, ctypes.byref(found), 13000, ctypes.c_uint64(0), None) for name in names]
MOST_DYNAMIC_SHARED_MEMORY = 8
functions = (hollow.cudaFuncSetAttribute, hollow._cudaFuncSetAttribute)
for size in (101_376, 101_377):
    codes += [function(None, MOST_DYNAMIC_SHARED_MEMORY, size) for function in functions]
print(codes)
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the hollow GPU is compiled by gcc, which is missing here")
def test_the_hollow_driver_finds_functions_and_bounds_kernels(tmp_path: Path) -> None:
    """An RTX 4090 has 101,376 bytes of shared memory. 500: no such function. 1: an invalid value."""
    library = build_library(tmp_path)
    variables = os.environ | {"CEPO_DRY_CARD": CARDS["RTX 4090"].described(1)}
    command = [sys.executable, "-c", LOOK_UP, str(library)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == [0, 0, 500, 0, 0, 1, 1]


def test_equal_shapes_describe_the_same_operation() -> None:
    """Shapes, strides, types and the kinds of numbers distinguish operations; values of tensors do not."""
    rows = torch.zeros(2, 3)
    assert described((rows, [1, 2.0])) == described((torch.ones(2, 3), [1, 2.0]))
    others = (torch.zeros(3, 2), torch.zeros(3, 2).T, rows.double())
    assert all(described((rows,)) != described((other,)) for other in others)
    assert described(1) != described(True)


def test_operations_on_large_tensors_only_allocate() -> None:
    """300,001 elements are large. An operation in place returns its operand, or nothing for a list; nothing is computed."""
    allocates = AllocatesLargeResults()
    large = torch.zeros(300_001)
    small = torch.zeros(3)
    add = torch.ops.aten.add.Tensor
    expected = Allocation((300_001,), (1,), torch.float32, torch.device("cpu"))
    assert allocates._result(add, (large, large), {}) == expected
    assert allocates._result(torch.ops.aten.add_.Tensor, (large, large), {}) == Operand(0)
    assert allocates._result(torch.ops.aten._foreach_add_.Scalar, ([small, large], 1.0), {}) is None
    assert allocates._result(add, (small, small), {}) is COMPUTED
    assert large.sum() == 0


@pytest.mark.parametrize(("name", "tiles", "tokens_per_tile"), [("internvl3-2b", 3, 256), ("smolvlm2-2.2b", 9, 81)])
def test_a_published_shapes_image_becomes_tiles(name: str, tiles: int, tokens_per_tile: int, tmp_path: Path) -> None:
    """InternVL cuts 896 x 448 pixels into 2 tiles, SmolVLM 1536 x 768 into 4 x 2; both add the whole image."""
    write_model(name, tmp_path)
    processing = Processing(str(tmp_path))
    prompt = processing.encode("<image>", processing.load_images([PUBLISHED[name].image()]))
    image_token = processing.placeholders[0]
    assert prompt.token_ids.count(image_token) == tiles * tokens_per_tile


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_a_published_shapes_tokenizer_has_the_models_length(name: str, tmp_path: Path) -> None:
    """The tiny checkpoint's few hundred tokens keep their ids, and few enough are banned for vLLM on a GPU."""
    write_model(name, tmp_path / "published")
    published = Processing(str(tmp_path / "published"))
    tiny = Processing(str(write_checkpoint(PUBLISHED[name].family, tmp_path / "tiny")))
    assert len(published.tokenizer) == PUBLISHED[name].text["vocab_size"]
    assert tiny.tokenizer.get_vocab().items() <= published.tokenizer.get_vocab().items()
    text = "Find the area of ABC. unwritten700"
    assert published.tokenizer(text)["input_ids"] == tiny.tokenizer(text)["input_ids"]
    assert len(published.banned_token_ids) <= MOST_BANNED_ON_GPU


def test_words_part_and_card_select_checks() -> None:
    def selected(**wanted: str) -> list[tuple[str, str, str]]:
        options = argparse.Namespace(**{"only": None, "card": None, "what": "", **wanted})
        return [check.name for check in checks() if is_asked(check, options)]

    assert len(selected()) == len(set(selected()))
    assert selected(only="engine", card="B200", what="all") == [("engine", "B200", "2b, all weights")]
    assert ("engine", "2 x H100", "2b, adapter, 2 ranks share it") in selected(what="2 ranks")


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


def test_a_check_that_ends_or_stops_leaves_no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It reports before it ends, ends with an error, or is stopped after 3 s; its child writes its own number."""
    monkeypatch.setattr("lab.gpu_dry.__main__.SECONDS", 3)
    child = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], "
    child += f"stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid, file=open({str(tmp_path / 'pid')!r}, 'w')); "
    report_of_three = 'print(\'gpu_dry: {"ok": true, "found": "3"}\'); '
    expected = {
        report_of_three: ({"ok": True, "found": "3"}, ""),
        "raise ValueError('no card')": (None, "exit code 1: ValueError: no card"),
        "import time; time.sleep(60)": (None, "no result after 3 s"),
    }
    for program, result in expected.items():
        assert finished([sys.executable, "-c", child + program], dict(os.environ)) == result
        number = int((tmp_path / "pid").read_text())
        deadline = time.monotonic() + 20  # a signal may arrive late
        while psutil.pid_exists(number) and psutil.Process(number).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the check's child still runs"
            time.sleep(0.1)


def test_the_page_has_the_record_of_todays_checks() -> None:
    rows = json.loads(RECORD.read_text(encoding="utf-8"))["checks"]
    names = [check.name for check in checks()]
    recorded = [(row["part"], row["card"], row["what"]) for row in rows]
    assert recorded == [name for name in names if name in recorded]
    assert page_table(rows) in (REPOSITORY / "lab" / "notes" / "gpu-dry.md").read_text(encoding="utf-8")
