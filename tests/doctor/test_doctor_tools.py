"""The doctor's view of compilers and headers, of the disk that wheels and weights take, and of what it is asked to look at."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from doctor_cases import GIB, machine

from cepo.config import load_config
from cepo.doctor import run_checks
from cepo.doctor.machine import Gpu, tool_findings
from cepo.doctor.run_checks import chosen_generator, disk_findings, engine_findings
from cepo.hardware import BuildTools
from cepo.rollout import factory
from cepo.rollout.generator import GeneratorSettings
from cepo.sizing import Memory

CARD = Gpu(name="H100", capability=(9, 0), total=80 * GIB, free=80 * GIB)
ALL_TOOLS = BuildTools(
    c_compiler="/usr/bin/gcc",
    python_headers="/usr/include/python",
    flashinfer_kernels=True,
)


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        ("c_compiler", "apt-get install -y gcc"),
        ("python_headers", f"apt-get install -y python3.{sys.version_info.minor}-dev"),
    ],
)
def test_vllm_needs_a_c_compiler_and_pythons_headers(missing: str, line: str) -> None:
    tools = ALL_TOOLS._replace(**{missing: None})
    (failed,) = (each for each in tool_findings(tools, with_vllm=True) if each.mark != "ok")
    assert (failed.mark, failed.remedy) == ("fail", line)
    assert "vLLM cannot start" in failed.found
    assert "warn" in [each.mark for each in tool_findings(tools, with_vllm=False)]
    assert [each.mark for each in tool_findings(ALL_TOOLS, with_vllm=True)] == ["ok", "ok"]


def test_weights_that_the_cache_lacks_need_room_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    config = load_config(["config=configs/geo3k/cepo.yaml"])
    needs = Memory(
        weights=0, optimizer=0, away=0, engine=0, least_pass=0, largest_pass=0, checkpoint=0, parameters=2 * 2**30
    )
    for free, mark in ((5 * GIB, "ok"), (3 * GIB, "fail")):
        monkeypatch.setattr(run_checks, "_free_bytes", lambda folder, free=free: free)
        _, found = disk_findings(needs, config)
        assert (found.mark, "takes 4.0 GiB" in found.found) == (mark, True)
    held = tmp_path / "hub" / "models--Qwen--Qwen3-VL-2B-Instruct" / "snapshots" / "abc"
    held.mkdir(parents=True)
    assert len(disk_findings(needs, config)) == 2
    (held / "model.safetensors").touch()
    assert [each.subject for each in disk_findings(needs, config)] == ["checkpoints"]


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
    settings = factory.settings_of_run(
        config.data, config.worker, num_devices=config.trainer.num_devices, most_visuals=(3, 1)
    )
    with pytest.raises(StartedError):
        factory.build_generator(settings, Tokens(), device="cuda")  # type: ignore[arg-type]
    assert seen == [settings]


def test_an_adapter_that_vllm_lacks_is_found_before_the_start() -> None:
    config = load_config(["config=configs/geo3k/cepo.yaml", "worker.actor.model.lora.rank=513"])
    (found,) = engine_findings(config, machine(gpus=(CARD,), tools=ALL_TOOLS))
    assert (found.mark, "LoRA rank 513 is above 512" in found.found) == ("fail", True)


def test_dora_needs_no_adapters_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLaVA-OneVision gets no adapters from vLLM; the run hands DoRA's over as full weights."""
    from cepo.models.families import LlavaOneVision

    monkeypatch.setattr(factory, "_why_not_vllm", lambda device: None)
    lora = ["config=configs/geo3k/cepo.yaml", "worker.actor.model.lora.rank=8", "worker.rollout.name=auto"]
    dora = [*lora, "worker.actor.model.lora.use_dora=true"]
    assert chosen_generator(load_config(lora), LlavaOneVision(), machine(gpus=(CARD,))) == "transformers"
    assert chosen_generator(load_config(dora), LlavaOneVision(), machine(gpus=(CARD,))) == "vllm"
