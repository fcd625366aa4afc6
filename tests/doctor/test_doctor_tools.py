"""The doctor's view of compilers and headers, of the disk that wheels and weights take, and of what it is asked to look at."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from doctor_cases import GIB, machine

from cepo.commands.doctor import run_doctor_command
from cepo.config import load_config
from cepo.doctor import run_checks
from cepo.doctor.findings import Finding
from cepo.doctor.machine import GPU_INSTALL_GB, Gpu, machine_findings, tool_findings
from cepo.doctor.model_and_engine import engine_findings
from cepo.doctor.run_checks import CHECKS, download_findings
from cepo.hardware.tools import BuildTools
from cepo.rollout import factory
from cepo.rollout.generator import GeneratorSettings
from cepo.sizing.needs import estimate_needs
from cepo.sizing.table import known_shape

REPOSITORY = Path(__file__).resolve().parents[2]
ALL_TOOLS = BuildTools(
    c_compiler="/usr/bin/gcc",
    cpp_compiler="/usr/bin/g++",
    ninja="/usr/bin/ninja",
    nvcc="/usr/local/cuda/bin/nvcc",
    python_headers="/usr/include/python",
    flashinfer_kernels=False,
)


def marks(missing: str, *, with_vllm: bool = True, flashinfer_first: bool = False, **changes: Any) -> Finding:
    """What is found of the one tool that is missing."""
    tools = dataclasses.replace(ALL_TOOLS, **{missing: None}, **changes)
    found = tool_findings(tools, with_vllm=with_vllm, flashinfer_first=flashinfer_first)
    (odd,) = (each for each in found if each.mark != "ok")
    return odd


def test_nothing_is_missing_where_every_tool_is_there() -> None:
    found = tool_findings(ALL_TOOLS, with_vllm=True, flashinfer_first=True)
    assert [each.subject for each in found] == ["C compiler", "Python headers", "ninja", "nvcc"]
    assert {each.mark for each in found} == {"ok"}


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        ("c_compiler", "apt-get install -y gcc"),
        ("python_headers", f"apt-get install -y python3.{sys.version_info.minor}-dev"),
    ],
)
def test_vllm_needs_a_c_compiler_and_pythons_headers(missing: str, line: str) -> None:
    """Training alone gets slower without them."""
    failed = marks(missing)
    assert (failed.mark, failed.remedy) == ("fail", line)
    assert "vLLM cannot start" in failed.found
    assert marks(missing, with_vllm=False).mark == "warn"


@pytest.mark.parametrize(("missing", "line"), [("ninja", "pip install ninja"), ("nvcc", "vllm download-kernels")])
def test_ninja_and_nvcc_matter_only_for_flashinfer(missing: str, line: str) -> None:
    """They stop nothing even there."""
    preferred, other = marks(missing, flashinfer_first=True), marks(missing)
    assert (preferred.mark, other.mark) == ("info", "info")
    assert line in preferred.remedy
    assert "vLLM uses FLASH_ATTN" in preferred.found
    assert other.remedy == ""
    assert "not needed" in other.found
    kernels = dataclasses.replace(ALL_TOOLS, ninja=None, nvcc=None, flashinfer_kernels=True)
    assert {each.mark for each in tool_findings(kernels, with_vllm=True, flashinfer_first=True)} == {"ok"}


def test_tools_are_checked_on_machines_with_a_gpu_alone() -> None:
    """A B200 prefers FlashInfer."""

    def of(*gpus: Gpu) -> dict[str, Finding]:
        tools = dataclasses.replace(ALL_TOOLS, nvcc=None)
        odd = machine(gpus=gpus, tools=tools, torch_cuda="13.0", compiled=("sm_90", "sm_100"), driver="580.65")
        return {each.subject: each for each in machine_findings(odd)}

    hopper = Gpu(name="H100", capability=(9, 0), total=80 * GIB, free=80 * GIB)
    blackwell = Gpu(name="B200", capability=(10, 0), total=180 * GIB, free=180 * GIB)
    assert "nvcc" not in of()
    assert "not needed" in of(hopper)["nvcc"].found
    assert "vLLM uses FLASH_ATTN" in of(hopper, blackwell)["nvcc"].found


def test_doctor_and_scripts_state_the_same_install_size() -> None:
    (warned,) = (
        each
        for each in machine_findings(machine(driver="580.65.06", environment_free=3 * GIB))
        if each.subject == "torch's build"
    )
    assert f"pip install 'cepo[gpu]', {GPU_INSTALL_GB} GB (3.0 GiB are free" in warned.remedy
    text = (REPOSITORY / "scripts" / "common.sh").read_text(encoding="utf-8")
    assert re.findall(r"gpu\*\) echo (\d+) ;;", text) == [str(GPU_INSTALL_GB)]


def test_weights_that_the_cache_lacks_need_room_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    config = load_config(["config=configs/geo3k/cepo.yaml"])
    needs = estimate_needs(config, cpu_engine=False, shape_of_path=lambda *arguments: known_shape("2B", arguments[3]))
    for free, mark in ((5 * GIB, "ok"), (3 * GIB, "fail")):
        monkeypatch.setattr(run_checks, "_free_for", lambda folder, free=free: free)
        (found,) = download_findings(needs, config)
        assert (found.mark, "have about 4.0 GiB" in found.found) == (mark, True)
    held = tmp_path / "hub" / "models--Qwen--Qwen3-VL-2B-Instruct" / "snapshots" / "abc"
    held.mkdir(parents=True)
    assert download_findings(needs, config)
    (held / "model.safetensors").touch()
    assert download_findings(needs, config) == []


def test_an_unknown_check_exits_2_and_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor_command(["config=configs/microgeo/base.yaml", "checks=memory,engines"]) == 2
    assert f"'engines' is unknown; accepted: {', '.join(CHECKS)}" in capsys.readouterr().err


def test_the_engine_is_described_as_the_run_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings that the doctor describes reach `start_engine` as they are."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from cepo.rollout import vllm_engine

    class StartedError(Exception):
        pass

    seen: list[GeneratorSettings] = []

    def start_engine(settings: GeneratorSettings) -> None:
        seen.append(settings)
        raise StartedError

    class Served:
        def why_not_vllm(self, use: object) -> str | None:
            return None

    class Tokens:
        banned_token_ids = (1,)
        eos_token_ids = (2,)
        family = Served()

    monkeypatch.setattr(vllm_engine, "start_engine", start_engine)
    monkeypatch.setattr(vllm_engine, "without_gpu", lambda: False)
    monkeypatch.setattr(factory, "_why_not_vllm", lambda device: None)
    config = load_config(["config=configs/geo3k/cepo.yaml", "worker.rollout.tensor_parallel_size=2"])
    settings = factory.settings_of_run(config, most_visuals=(3, 1))
    with pytest.raises(StartedError):
        factory.build_generator(settings, Tokens(), device="cuda")  # type: ignore[arg-type]
    assert seen == [settings]


def test_an_adapter_that_vllm_lacks_is_found_before_the_start() -> None:
    gpu = Gpu(name="H100", capability=(9, 0), total=80 * GIB, free=80 * GIB)
    config = load_config(["config=configs/geo3k/cepo.yaml", "worker.actor.model.lora.rank=513"])
    (found,) = engine_findings(config, machine(gpus=(gpu,), tools=ALL_TOOLS), sleeps=False)
    assert (found.mark, "LoRA rank 513 is above 512" in found.found) == ("fail", True)
    assert engine_findings(config, machine(), sleeps=False) == []


def test_dora_needs_no_adapters_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLaVA-OneVision gets no adapters from vLLM; the run hands DoRA's over as full weights."""
    from cepo.doctor import model_and_engine
    from cepo.models.families import LlavaOneVision

    monkeypatch.setattr(model_and_engine, "family_of_run", lambda config: LlavaOneVision())
    lora = ["config=configs/geo3k/cepo.yaml", "worker.actor.model.lora.rank=8"]
    assert model_and_engine._unserved(load_config(lora), "cuda") == "vLLM serves no LoRA adapters on LLaVA-OneVision"
    assert model_and_engine._unserved(load_config([*lora, "worker.actor.model.lora.use_dora=true"]), "cuda") is None
