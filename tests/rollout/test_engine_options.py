"""What vLLM is started with on each kind of machine, and how vLLM's own code reads it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cepo.commands.machine import c_compiler
from cepo.config import load_config
from cepo.errors import EngineError
from cepo.hardware import with_own_programs
from cepo.models.response_end import ResponseEnd
from cepo.rollout.factory import settings_of_run
from cepo.rollout.generator import GeneratorSettings
from cepo.rollout.vllm_engine import stopping
from cepo.rollout.vllm_process import engine_options

SETTINGS = GeneratorSettings(
    model_path="org/model",
    dtype="bf16",
    max_model_len=3072,
    sleep=False,
    max_num_seqs=256,
    lora_rank=16,
)


def options(
    capability: tuple[int, int] | None, *, flashinfer_kernels: bool = False, num_ranks: int = 1, **changes: Any
) -> dict[str, Any]:
    settings = dataclasses.replace(SETTINGS, **changes)
    return engine_options(settings, capability=capability, flashinfer_kernels=flashinfer_kernels, num_ranks=num_ranks)


@pytest.mark.parametrize(
    ("capability", "flashinfer_kernels", "backend"),
    [
        ((8, 0), False, None),
        ((9, 0), False, None),
        ((10, 0), False, "FLASH_ATTN"),
        ((10, 3), False, "FLASH_ATTN"),
        ((10, 0), True, None),
        ((12, 0), False, None),
    ],
)
def test_attention_compiles_nothing_of_flashinfer_at_the_start(
    capability: tuple[int, int], flashinfer_kernels: bool, backend: str | None
) -> None:
    attention = options(capability, flashinfer_kernels=flashinfer_kernels).get("attention_config")
    assert attention == (None if backend is None else {"backend": backend})


def test_2_devices_of_an_engine_reduce_by_nccl_alone() -> None:
    shared = options((9, 0), num_ranks=2, tensor_parallel_size=2)
    assert shared["disable_custom_all_reduce"] is True
    assert shared["compilation_config"]["pass_config"] == {"fuse_allreduce_rms": False}
    assert shared["distributed_executor_backend"] == "external_launcher"
    assert options((9, 0))["distributed_executor_backend"] is None


@pytest.mark.parametrize(
    ("changes", "most", "captured"),
    [
        ([], 256, 256),
        (["worker.rollout.n=5", "data.rollout_batch_size=30", "worker.actor.global_batch_size=30"], 150, 160),
        (["trainer.n_gpus_per_node=8"], 128, 128),
        (["trainer.nnodes=2", "trainer.n_gpus_per_node=4", "worker.rollout.n=64"], 256, 256),
        (["trainer.n_gpus_per_node=4", "worker.rollout.tensor_parallel_size=2", "worker.rollout.n=16"], 256, 256),
        (["worker.rollout.n=12"], 384, 384),
        (["worker.rollout.n=90"], 1024, 512),
        (["worker.rollout.max_num_seqs=20"], 20, 32),
    ],
)
def test_the_engine_has_room_and_graphs_for_a_ranks_responses(changes: list[str], most: int, captured: int) -> None:
    """The base is 32 prompts x 8 on one device. vLLM would take 1,024 at once and capture graphs up to 512 tokens.

    Validation has other batches, so there is room for 128.
    """
    batch = ["data.rollout_batch_size=32", "worker.actor.global_batch_size=32", "worker.rollout.n=8"]
    config = load_config(["config=configs/geo3k/cepo.yaml", *batch, *changes])
    settings = settings_of_run(config.data, config.worker, num_devices=config.trainer.num_devices, most_visuals=(1, 0))
    engine_options = options((9, 0), **vars(settings))
    assert engine_options["max_num_seqs"] == most
    sizes = engine_options["compilation_config"]["cudagraph_capture_sizes"]
    assert sizes[-1] == captured
    assert len(sizes) <= 16 or most > 256, "an H200 took a second to capture four graphs of one size"
    eager = options((9, 0), enforce_eager=True, max_num_seqs=most)
    assert "cudagraph_capture_sizes" not in eager["compilation_config"]


def test_adapters_are_served_on_the_named_layers_alone() -> None:
    assert options((9, 0))["lora_target_modules"] is None
    assert options((9, 0), adapted_layers=("k_proj", "q_proj"))["lora_target_modules"] == ["k_proj", "q_proj"]


@pytest.mark.parametrize(
    ("capability", "words"),
    [((8, 9), None), ((9, 0), None), ((12, 0), None), ((8, 6), "this one's is 8.6"), (None, "there is none")],
)
def test_fp8_weights_need_a_card_that_computes_in_fp8(capability: tuple[int, int] | None, words: str | None) -> None:
    if words is None:
        assert options(capability, quantization="fp8")["quantization"] == "fp8"
        assert options(capability)["quantization"] is None
        return
    with pytest.raises(EngineError, match=f"quantization is fp8, which needs .* 8.9 or later .* but {words}"):
        options(capability, quantization="fp8")


@pytest.mark.parametrize(("sleep", "on_gpu"), [(True, True), ("auto", True), (False, False)])
def test_an_engine_of_a_gpu_sleeps_unless_it_is_told_not_to(sleep: bool | str, on_gpu: bool) -> None:
    """`auto` is decided by the memory estimate; an engine that is started without one sleeps."""
    assert options((9, 0), sleep=sleep)["enable_sleep_mode"] is on_gpu
    assert options(None, sleep=sleep)["enable_sleep_mode"] is False


def test_without_a_gpu_nothing_of_a_gpus_start_is_asked_for() -> None:
    engine_options = options(None, sleep=True)
    assert engine_options["enforce_eager"]
    assert not engine_options["enable_sleep_mode"]
    assert not {"attention_config", "disable_custom_all_reduce", "compilation_config"} & engine_options.keys()
    assert options((9, 0), sleep=True)["enable_sleep_mode"]
    assert not options((9, 0))["enforce_eager"]
    with pytest.raises(EngineError, match=r"tensor_parallel_size is 2, but .* on GPUs only.* set it to 1"):
        options(None, tensor_parallel_size=2)


@pytest.mark.heavy
def test_vllms_own_code_reads_what_it_is_given() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    engine_options = [
        options(None, sleep=True),
        options((9, 0), num_ranks=2, tensor_parallel_size=2, sleep=True),
        options((10, 0), num_ranks=2, tensor_parallel_size=2, sleep=True),
    ]
    for settings in engine_options:
        settings["hf_overrides"] = {}  # a function of the package, which has no spelling in a script
    script = f"""
import inspect, json, logging, os, sys
import cepo
from cepo.rollout import vllm_process
assert "vllm" not in sys.modules
facts = {{}}

vllm_process.prepare_environment(on_gpu=True)
from vllm import envs
names = "VLLM_USE_FLASHINFER_SAMPLER", "VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER"
read = lambda: [getattr(envs, name) for name in names]
facts["the user's variables"] = read()
del os.environ["VLLM_USE_FLASHINFER_SAMPLER"]
vllm_process.prepare_environment(on_gpu=True)
facts["our variables"] = read()
facts["path"] = os.environ["PATH"]

from vllm.utils import jit_monitor
seen = []
logging.getLogger("vllm").handlers = [type("Kept", (logging.Handler,), {{"emit": lambda self, record: seen.append(1)}})()]
jit_monitor._log_triton_jit_compile("the_trainers_kernel", {{}})
silenced = len(seen)
logging.getLogger("vllm.utils.jit_monitor").setLevel(logging.NOTSET)
jit_monitor._log_triton_jit_compile("another_kernel", {{}})
facts["warnings of compiled kernels, silenced and not"] = [silenced, len(seen)]

from vllm.config import AttentionConfig, CompilationConfig
from vllm.engine.arg_utils import EngineArgs
engine_options = {engine_options!r}
known = inspect.signature(EngineArgs).parameters
facts["unknown options"] = [list(settings.keys() - known.keys()) for settings in engine_options]
compilation = CompilationConfig(**engine_options[2]["compilation_config"])
facts["options read"] = [
    AttentionConfig(**engine_options[2]["attention_config"]).backend.name,
    compilation.pass_config.fuse_allreduce_rms,
    compilation.cudagraph_capture_sizes[-1],
]

print(json.dumps(facts))
"""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    variables = {"CUDA_VISIBLE_DEVICES": "0", "PATH": "/usr/bin:/bin", "VLLM_USE_FLASHINFER_SAMPLER": "1"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=inherited | variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "unknown options": [[], [], []],
        "options read": ["FLASH_ATTN", False, 256],
        "the user's variables": [True, False, False],
        "our variables": [False, False, False],
        "path": f"{Path(sys.executable).parent}{os.pathsep}/usr/bin:/bin",
        "warnings of compiled kernels, silenced and not": [0, 1],
    }


def test_vllm_stops_at_each_end_of_a_response() -> None:
    """Where a text ends a turn, the declared tokens end a response too; texts are compared only if vLLM makes them."""
    by_token = stopping(ResponseEnd((9, 7)), ignore_eos=False)
    assert by_token == {"ignore_eos": True, "detokenize": False, "stop_token_ids": [7, 9]}
    by_text = stopping(ResponseEnd((7,), text="</s>"), ignore_eos=False)
    assert by_text == {
        "ignore_eos": True,
        "detokenize": True,
        "stop_token_ids": [7],
        "stop": ["</s>"],
        "include_stop_str_in_output": True,
    }
    assert stopping(ResponseEnd((7,), text="</s>"), ignore_eos=True) == {"ignore_eos": True, "detokenize": False}


def test_the_c_compiler_may_be_on_the_path_or_beside_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`CC` decides alone."""
    pythons_folder = tmp_path / "venv" / "bin"
    path = tmp_path / "path"
    for program in (pythons_folder / "python", pythons_folder / "gcc", path / "clang", path / "my-cc"):
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    assert c_compiler({"PATH": str(path)}) == str(path / "clang")
    monkeypatch.setattr(sys, "executable", str(pythons_folder / "python"))
    assert c_compiler({"PATH": str(path)}) == str(pythons_folder / "gcc")
    assert c_compiler({"PATH": str(path), "CC": "my-cc"}) == str(path / "my-cc")
    assert c_compiler({"PATH": str(path), "CC": "no-such-compiler"}) is None


def test_this_pythons_programs_come_first_on_the_path_once() -> None:
    pythons_folder = str(Path(sys.executable).parent)
    once = with_own_programs("/usr/bin")
    assert once.split(os.pathsep) == [pythons_folder, "/usr/bin"]
    assert with_own_programs(once) == once
    assert with_own_programs("") == pythons_folder
