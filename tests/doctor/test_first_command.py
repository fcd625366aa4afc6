"""The first command on a rented GPU, dry: the launcher asks the doctor, and starts nothing where training cannot start.

No card is there. A stand-in (tests/fake_cuda) answers for `nvidia-smi` and for torch where it is asked about devices, and the
model is Qwen3-VL-2B's configuration alone. What the engine would be started with: tests/rollout/test_engine_options.py.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from fake_machine import REPOSITORY, card, fake_machine

from lab.support.published_models import published_config

pytestmark = pytest.mark.heavy  # each is a launcher of its own, which starts Python several times


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


def test_the_papers_command_would_start_on_a_b200(model_folder: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    done = dry_run(model_folder)
    assert done.returncode == 0, done.stderr
    found = [" ".join(line.replace("│", " ").split()) for line in done.stderr.splitlines()]
    for line in (
        "device ok NVIDIA B200, 168 GiB",
        "model ok Qwen3-VL; rows that share tokens are packed",
        "generator ok vllm",
        "needed info 2,127,532,032 parameters; weights 4.0 GiB, optimizer 133 MiB, generator 4.3 GiB with one request, "
        "largest pass at most 6.1 GiB",
        "fits GPU 0 ok 167.2 GiB are free",
    ):
        assert line in found
    plan = done.stdout.splitlines()
    assert "# samples per step: 32 prompts x 8 responses = 256" in plan
    assert "# trained weights: LoRA, rank 16, scale 2" in plan
    assert "# length: 50 steps" in plan


def test_the_launcher_ends_where_the_doctor_says_no(model_folder: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM, whose share of the memory this is, is not installed")
    done = dry_run(model_folder, "worker.rollout.gpu_memory_utilization=0.99")
    assert done.returncode == 1
    assert "another share for vLLM (worker.rollout.gpu_memory_utilization)" in " ".join(done.stderr.split())
    assert "SKIP_DOCTOR=1 tries it nevertheless" in done.stderr.splitlines()[-1]
    assert done.stdout == ""
