"""vLLM and transformers' processors import in any process of an environment whose torchvision was built for CUDA."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from _cepo_cpu_torch import mismatched_builds

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = sysconfig.get_path("purelib")
CPU_BUILD = (
    "from typing import Optional\n__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
)
CUDA_BUILD = CPU_BUILD.replace("cuda: Optional[str] = None", "cuda: Optional[str] = '13.0'")
PROCESSOR = "from transformers import AutoProcessor\nprint(type(AutoProcessor.from_pretrained({folder!r})).__name__)"


def output_of(statements: str, *options: str, folder: Path, **environment: str) -> str:
    """What a process prints that has no environment variables but these and `folder`, which is empty, to work in."""
    usual = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", *options, "-c", statements]
    done = subprocess.run(
        command, cwd=folder, env=usual | environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def without_site(statements: str, *paths: str | Path, folder: Path, **environment: str) -> str:
    """As `output_of`, with these paths before the libraries and without any start-up file that may be installed."""
    paths_first = f"import sys\nsys.path[:0] = {[str(path) for path in paths]!r}\nsys.path.append({PACKAGES!r})\n"
    return output_of(paths_first + statements, "-S", folder=folder, **environment)


@pytest.fixture(scope="module")
def startup_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that a wheel of this package puts beside the package, under the names they have there."""
    folder = tmp_path_factory.mktemp("site-packages")
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    beside = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert len(beside) == 2
    for source, name in beside.items():
        shutil.copy(REPOSITORY / source, folder / name)
    return folder


@pytest.mark.heavy
def test_a_saved_processor_is_read_with_startup_files_alone(
    startup_files: Path, tiny_model_folder: Path, tmp_path: Path
) -> None:
    start = f"import site\nsite.addsitedir({str(startup_files)!r})\n"
    printed = without_site(start + PROCESSOR.format(folder=str(tiny_model_folder)), startup_files, folder=tmp_path)
    assert printed == "Qwen3VLProcessor"


@pytest.mark.heavy
def test_the_environment_imports_vllm_and_reads_a_processor(tiny_model_folder: Path, tmp_path: Path) -> None:
    try:
        installed = importlib.metadata.distribution("cepo")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("cepo was not installed into this environment by pip")
    if "hatchling" not in (installed.read_text("WHEEL") or ""):
        pytest.skip("cepo was installed into this environment before it had start-up files: pip install -e . again")
    assert {"_cepo_cpu_torch.py", "_cepo_cpu_torch.pth"} <= {str(file) for file in installed.files or ()}
    printed = output_of(PROCESSOR.format(folder=str(tiny_model_folder)), folder=tmp_path)
    assert printed == "Qwen3VLProcessor"
    pytest.importorskip("vllm")
    printed = output_of("import vllm\nfrom vllm import LLM\nprint(LLM.__name__)", folder=tmp_path)
    assert printed.splitlines()[-1] == "LLM"


@pytest.mark.heavy
def test_importing_cepo_first_replaces_the_startup_files(tiny_model_folder: Path, tmp_path: Path) -> None:
    """This reaches child processes."""
    processor = PROCESSOR.format(folder=str(tiny_model_folder))
    own = f"import cepo, json, os\n{processor}\nprint(json.dumps(os.environ.get('PYTHONPATH', '')))"
    name, path = without_site(own, REPOSITORY, folder=tmp_path).splitlines()
    assert name == "Qwen3VLProcessor"
    if not mismatched_builds():
        assert json.loads(path) == ""
        return
    children = REPOSITORY / "cepo" / "child_site"
    assert json.loads(path).split(os.pathsep) == [str(children)]
    child = "import sitecustomize, torchvision\nprint(torchvision.__name__)"
    assert without_site(child, children, folder=tmp_path) == "torchvision"


def test_starting_an_interpreter_loads_1_small_module(startup_files: Path, tmp_path: Path) -> None:
    """No file of torch is opened."""
    watched = (
        "import site\nopened = []\n"
        "def watch(name, args):\n"  # a cache file of bytecode is opened by name, and then once more by its descriptor
        "    if name == 'open' and isinstance(args[0], str):\n"
        "        opened.append(args[0])\n"
        "sys.addaudithook(watch)\n"
        f"before = set(sys.modules)\nsite.addsitedir({str(startup_files)!r})\n"
        "print(*sorted(set(sys.modules) - before))\nprint(*opened)"
    )
    loaded, opened = without_site(watched, startup_files, folder=tmp_path).splitlines()
    assert loaded.split() == ["__future__", "_cepo_cpu_torch"]
    standard_library = Path(os.__file__).parent
    assert {Path(file).parent.name for file in opened.split()} <= {startup_files.name, "__pycache__"}
    assert all(file.startswith((str(startup_files), str(standard_library))) for file in opened.split())


@pytest.mark.parametrize(
    ("torch", "needs", "expected"),
    [
        (CPU_BUILD, b"libtorch_cpu.so\0libc10_cuda.so\0", ("torchvision", "torchaudio", "torchcodec")),
        (CPU_BUILD, b"libtorch_cpu.so\0", ()),
        (CUDA_BUILD, b"libtorch_cpu.so\0libc10_cuda.so\0", ()),
        (None, b"libtorch_cpu.so\0libc10_cuda.so\0", ()),
    ],
    ids=["CPU torch, CUDA builds", "CPU torch, CPU builds", "CUDA torch", "no torch"],
)
def test_builds_mismatch_if_torch_is_cpu_and_its_kin_cuda(
    torch: str | None, needs: bytes, expected: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = {
        "torchvision": "_C.so",
        "torchaudio": "lib/_torchaudio.abi3.so",
        "torchcodec": "libtorchcodec_image.so",
    }
    for package, library in libraries.items():
        file = tmp_path / package / library
        file.parent.mkdir(parents=True)
        file.write_bytes(b"\x7fELF" + needs)
        (tmp_path / package / "__init__.py").touch()
    if torch is not None:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").touch()
        (tmp_path / "torch" / "version.py").write_text(torch, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert mismatched_builds() == expected


def test_torchaudio_beside_a_cpu_torch_counts_as_missing(startup_files: Path, tmp_path: Path) -> None:
    """The message says why."""
    if "torchaudio" not in mismatched_builds():
        pytest.skip("torchaudio is missing here or matches torch")
    tried = (
        f"import site\nsite.addsitedir({str(startup_files)!r})\n"
        "try:\n    import torchaudio\nexcept ModuleNotFoundError as error:\n    print(error)\n"
        "import importlib.util\nprint(importlib.util.find_spec('torchaudio'))"
    )
    assert without_site(tried, startup_files, folder=tmp_path).splitlines() == [
        "No module named 'torchaudio' that was built for this CPU build of torch",
        "None",
    ]
