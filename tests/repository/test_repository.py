"""Files that no program of the package reads: versions, pinned environments, licences, workflows, pages; and a wheel alone."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import requires
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import cepo
from cepo.config.easyr1 import EASYR1_KEYS, engine_key_of
from cepo.config.listing import settings_of
from cepo.sections.messages import written
from scripts.audit import verdict
from scripts.constraints import FILES, pins_in

REPOSITORY = Path(__file__).resolve().parents[2]
CONSTRAINTS = sorted((REPOSITORY / "constraints").glob("*.txt"))
USABLE = {
    "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CNRI-Python",
    "CC0-1.0", "ISC", "MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "Unlicense", "Zlib",
    # Weak copyleft, which holds for the packages' own files and not for a program that imports them.
    "LGPL", "LGPL-2.1-only", "MPL-2.0",
}  # fmt: skip
"""Licences of packages that an Apache-2.0 program may import."""
PROPRIETARY = {"intel-cmplr-lib-ur": "Intel EULA", "intel-openmp": "Intel EULA"}
"""Brought by vLLM's CPU build; free to use and to redistribute."""
NVIDIAS = ("nvidia-", "cuda-")
PAGES = sorted(
    page
    for pattern in (
        "*.md",
        "docs/*.md",
        "lab/notes/*.md",
        "configs/*.md",
        "examples/*/*.md",
        "lab/*.md",
        "lab/studies/*.md",
    )
    for page in REPOSITORY.glob(pattern)
)
WIDTH = 100
STATION = re.compile(r"^(\d+)\. `(cepo/[\w/]+\.py)`: `([\w.]+)` ", re.MULTILINE)
FILES_OF_EASYR1 = {"examples/config.yaml", "scripts/model_merger.py"}


def project() -> dict[str, Any]:
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]


def ran(*command: str, folder: Path, **variables: str) -> str:
    """What a command prints in `folder`, with these environment variables beside the others."""
    done = subprocess.run(
        command, cwd=folder, env=os.environ | variables, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def versions_in(file: Path) -> dict[str, set[str]]:
    """The versions of each package: several where Pythons or systems need different ones."""
    versions: dict[str, set[str]] = {}
    for pin in pins_in(file.read_text(encoding="utf-8")):
        versions.setdefault(canonicalize_name(pin.name), set()).add(str(pin.specifier).removeprefix("=="))
    return versions


def test_changelog_citation_and_readme_have_the_version() -> None:
    versions = re.findall(
        r"^## (\d+\.\d+\.\d+) - 20\d\d-\d\d-\d\d$", (REPOSITORY / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE
    )
    assert versions[0] == cepo.__version__
    assert yaml.safe_load((REPOSITORY / "CITATION.cff").read_text("utf-8"))["version"] == cepo.__version__
    assert f"version {cepo.__version__}." in (REPOSITORY / "README.md").read_text("utf-8")


@pytest.mark.parametrize("file", CONSTRAINTS, ids=lambda file: file.stem)
def test_constraints_satisfy_the_ranges_of_their_extras(file: Path) -> None:
    versions = versions_in(file)
    declared = project()
    for text in chain(
        declared["dependencies"], *(declared["optional-dependencies"][extra] for extra in FILES[file.stem])
    ):
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name == "cepo":
            assert requirement.extras <= set(FILES[file.stem]) | {"train", "cpu"}
            continue
        assert versions.get(name), f"{file.name} lacks {name}; run python3 scripts/constraints.py"
        for version in versions[name]:
            assert requirement.specifier.contains(version), f"{file.name}: {name}=={version}, not {requirement}"


def test_every_extra_is_in_a_constraints_file() -> None:
    assert {file.stem for file in CONSTRAINTS} == set(FILES)
    assert {extra for extras in FILES.values() for extra in extras} == set(project()["optional-dependencies"])


def test_constraints_have_one_torch_and_the_triton_that_it_pins() -> None:
    for name in ("cpu", "gpu"):
        versions = versions_in(REPOSITORY / "constraints" / f"{name}.txt")
        assert (versions["torch"], versions["triton"]) == ({"2.13.0"}, {"3.7.1"})
    pinned = [Requirement(text) for text in requires("torch") or () if text.startswith("triton==")]
    assert [pin for pin in pinned if str(pin.specifier) != "==3.7.1"] == []


def test_each_pinned_package_has_a_licence_that_may_be_used() -> None:
    """Those of the extra gpu alone are named with theirs on a page of their own."""
    row = re.compile(r"^\| ([a-z0-9][a-z0-9-]*) \| (\d\S*).* \| (.+) \|$", re.MULTILINE)
    of_other_extras = row.findall((REPOSITORY / "lab" / "notes" / "licences.md").read_text(encoding="utf-8"))
    of_gpu = row.findall((REPOSITORY / "lab" / "notes" / "licences-gpu.md").read_text(encoding="utf-8"))
    pinned: set[tuple[str, str]] = set()
    for file in CONSTRAINTS:
        if file.stem != "gpu":
            for name, versions in versions_in(file).items():
                pinned |= {(name, version) for version in versions}
    assert {(name, version) for name, version, _ in of_other_extras} == pinned
    assert set(versions_in(REPOSITORY / "constraints" / "gpu.txt")) <= {
        name for name, _, _ in [*of_other_extras, *of_gpu]
    }
    for name, _, licence in of_other_extras:
        if name in PROPRIETARY:
            assert licence == PROPRIETARY[name]
            continue
        of_nvidia = name.startswith(NVIDIAS) and ("NVIDIA" in licence or licence == "none stated")
        usable = set(re.split(" AND | OR ", licence.translate({40: None, 41: None}))) <= USABLE
        assert of_nvidia or usable, f"{name}: {licence}"


def test_a_scan_that_looked_nothing_up_is_no_success() -> None:
    """pip-audit reports success for packages that it could not look up."""
    sound = {"name": "a", "version": "1", "vulns": []}
    skipped = {"name": "b", "skip_reason": "Dependency not found on PyPI"}
    vulnerable = {"name": "c", "version": "2", "vulns": [{"id": "CVE-1"}]}
    assert verdict([sound]) == (0, "1 of 1 packages were looked up, 0 known vulnerabilities")
    assert verdict([sound, skipped])[0] == verdict([])[0] == 3
    assert "NOT SCANNED: 1 packages" in verdict([sound, skipped])[1]
    assert verdict([vulnerable, skipped])[0] == 1
    assert verdict([vulnerable])[1].startswith("c 2: CVE-1")


def test_workflows_call_scripts_that_exist() -> None:
    workflows = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
    text = "\n".join(file.read_text("utf-8") for file in workflows)
    named = set(re.findall(r"\b(?:scripts|constraints)/[\w./-]+", text))
    assert {"scripts/test.sh", "scripts/quickstart.sh"} <= named
    assert [path for path in sorted(named) if not (REPOSITORY / path).is_file()] == []


@pytest.mark.parametrize("file", (REPOSITORY / "scripts" / "docker").glob("Dockerfile.*"), ids=lambda file: file.name)
def test_an_image_copies_files_that_exist_and_pins_its_extra(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    copied: set[str] = set()
    for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
        *sources, _ = line.split()
        copied.update(sources)
    assert {"pyproject.toml", "README.md", "LICENSE", "cepo", "scripts"} <= copied
    lost = [name for name in copied if not (REPOSITORY / name).exists()]
    assert not lost, f"{file.name} copies {lost}, which do not exist"
    pyproject = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))
    wheel = pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]
    for name in wheel["force-include"]:
        top_folder = name.partition("/")[0]
        assert copied & {name, top_folder}, f"{file.name} lacks {name}, which a wheel has"
    extra = file.suffix.removeprefix(".")
    assert f"'.[{extra}]' -c constraints/{extra}.txt" in text
    assert f"constraints/{extra}.txt" in copied


def test_make_lists_the_commands_of_a_contributor() -> None:
    assert [line.split()[0] for line in ran("make", "help", folder=REPOSITORY).splitlines()] == [
        "help", "fmt", "check", "fast", "test", "nightly", "docs", "audit", "release", "verl", "gpu-dry", "gpu"
    ]  # fmt: skip


@pytest.mark.heavy
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install -e '.[docs]'")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: pip install -e '.[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "scripts/mkdocs.yml", "--site-dir", str(tmp_path / "site")],
        cwd=REPOSITORY, env={"PATH": "/usr/bin:/bin", "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert 'id="cepo.algorithms.base.Estimator.signal"' in (tmp_path / "site" / "api.html").read_text("utf-8")


def test_the_images_were_made_from_todays_page() -> None:
    """Remade by scripts/make_images.py."""
    command = [sys.executable, str(REPOSITORY / "scripts" / "make_images.py"), "--check"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"run python3 scripts/make_images.py\n{done.stderr}"


@pytest.mark.heavy
def test_the_generated_pages_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["generate_docs.py", "--check"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(REPOSITORY / "scripts" / "generate_docs.py"), run_name="__main__")
    assert stop.value.code == 0, "run python3 scripts/generate_docs.py"


def test_the_easyr1_page_has_a_row_for_each_key_that_differs() -> None:
    """A key without a row is a setting here, with EasyR1's default, or stands with the reason why it has no effect."""
    page = (REPOSITORY / "docs" / "from-easyr1.md").read_text(encoding="utf-8").partition("## Keys that differ")[2]
    rows = re.findall(r"^\| `([a-z_.0-9]+)` \|", page, flags=re.MULTILINE)
    assert rows == [name for name in EASYR1_KEYS if name in rows]
    ours = {setting.key: setting.default for setting in settings_of()}
    for name, key in EASYR1_KEYS.items():
        if engine_key_of(name) is not None:
            assert f"`{name}`" in page
        elif name not in rows:
            assert written(ours[name]) == written(key.default), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_a_page_is_wrapped_and_what_it_names_exists(page: Path) -> None:
    """Rows of tables may be longer, and lines of one word (a long link), which cannot wrap; history names what is gone."""
    text = page.read_text(encoding="utf-8")
    long = [
        line for line in text.splitlines() if len(line) > WIDTH and not line.startswith("|") and " " in line.strip()
    ]
    assert not long, f"{page.name} has lines of more than {WIDTH} columns"
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
    named = set(re.findall(r"`([a-z_0-9/]+/[a-z_0-9]+\.(?:py|sh|yaml|yml|jinja))`", text)) - FILES_OF_EASYR1
    roots = [REPOSITORY, *(REPOSITORY / name for name in ("cepo", "configs", "tests"))]
    if page.name == "CHANGELOG.md":
        return
    for name in named:
        is_there = [(root / name).is_file() for root in roots]
        assert any(is_there), f"{page.name} names {name}, which does not exist"


def test_a_prompts_stations_are_functions_that_exist() -> None:
    page = (REPOSITORY / "lab" / "notes" / "architecture.md").read_text(encoding="utf-8")
    section = page.split("## The path of one prompt\n")[1].split("\n## ")[0]
    stations = STATION.findall(section)
    assert [int(number) for number, _, _ in stations] == list(range(1, 13))
    assert len(stations) == len(re.findall(r"^\d+\. ", section, re.MULTILINE))
    for _, file, name in stations:
        module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        assert inspect.isfunction(attrgetter(name)(module)), f"{file}: {name}"


def test_the_table_of_packages_names_modules_that_exist() -> None:
    """Two modules had moved, and their packages' rows still named them."""
    page = (REPOSITORY / "lab" / "notes" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+/)` \| (.*) \|", page, re.MULTILINE)
    assert len(rows) > 15
    gone: list[str] = []
    for package, contents in rows:
        folder = REPOSITORY / "cepo" / package
        assert folder.is_dir(), package
        for names in re.findall(r"\((`\w+`(?:, `\w+`)*)\)", contents):
            modules = re.findall(r"\w+", names)
            gone += [f"{package}{name}" for name in modules if not any(folder.rglob(f"{name}.py"))]
    assert gone == []


SHIPPED = (
    "configs/geo3k/cepo.yaml", "configs/format_prompt/geo3k.jinja", "configs/teacher/user_suffix.jinja",
    "scripts/geo3k/cepo.sh", "scripts/common.sh",
)  # fmt: skip
HEAVIER = ("accelerate", "datasets", "matplotlib", "omegaconf", "peft", "ray", "transformers", "vllm")


def python(code: str, *, packages: Path, folder: Path) -> str:
    """What a process prints that finds cepo in `packages` and works in `folder`."""
    return ran(sys.executable, "-P", "-c", code, folder=folder, PYTHONPATH=str(packages))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install -e '.[dev]'")
    folder = tmp_path_factory.mktemp("dist")
    ran(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), folder=REPOSITORY)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as pip's site-packages with the wheel alone."""
    folder = tmp_path_factory.mktemp("site-packages")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.mark.heavy
def test_a_wheel_has_what_is_run_and_nothing_that_runs_by_itself(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {
        "cepo",
        next(name for name in names if ".dist-info" in name).split("/")[0],
    }
    assert [name for name in names if name.endswith(".pth") or "__pycache__" in name] == []
    assert {f"cepo/shipped/{file}" for file in SHIPPED} <= set(names)
    assert wheel.stat().st_size < 7_000_000


@pytest.mark.heavy
def test_metadata_are_complete_and_the_base_is_light(unpacked: Path) -> None:
    (file,) = unpacked.glob("cepo-*.dist-info/METADATA")
    fields: Message = Parser().parsestr(file.read_text(encoding="utf-8"))
    assert all(fields[name] for name in ("Author", "Summary", "License-Expression", "Requires-Python", "Project-URL"))
    assert len(fields.get_all("Classifier", [])) > 5
    always = [text for text in fields.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert sorted(text.split(">")[0] for text in always) == ["click", "jaxtyping", "pydantic"]


@pytest.mark.heavy
def test_shipped_configurations_are_found_by_name_in_a_wheel(unpacked: Path, tmp_path: Path) -> None:
    show = "from cepo.commands.cli import main; import sys; sys.exit(main(['config', 'config=microgeo/cepo']))"
    settings = yaml.safe_load(python(show, packages=unpacked, folder=tmp_path))
    assert settings["algorithm"]["adv_estimator"] == "cepo"
    assert settings["data"]["format_prompt"] == str(unpacked / "cepo/shipped/configs/format_prompt/microgeo.jinja")
    (tmp_path / "microgeo").mkdir()
    (tmp_path / "microgeo" / "cepo").write_text("base: ../mine.yaml\nalgorithm: {adv_estimator: rloo}\n")
    (tmp_path / "mine.yaml").write_text((unpacked / "cepo/shipped/configs/microgeo/base.yaml").read_text())
    settings = yaml.safe_load(python(show, packages=unpacked, folder=tmp_path))
    assert settings["algorithm"]["adv_estimator"] == "rloo"


@pytest.mark.heavy
def test_init_copies_what_a_launcher_needs(unpacked: Path, tmp_path: Path) -> None:
    init = "from cepo.commands.cli import main; import sys; sys.exit(main(['init', 'mine']))"
    assert "configs, examples" in python(init, packages=unpacked, folder=tmp_path)
    launcher = ("bash", "mine/scripts/geo3k/rlsd.sh", "4b", "trainer.seed=3")
    variables = {"CEPO_PYTHON": sys.executable, "DRY_RUN": "1", "PYTHONPATH": str(unpacked)}
    settings = yaml.safe_load(ran(*launcher, folder=tmp_path, **variables))
    assert (settings["algorithm"]["adv_estimator"], settings["trainer"]["seed"]) == ("rlsd", 3)
    twice = "from cepo.commands.cli import main; print(main(['init', 'mine']))"
    assert python(twice, packages=unpacked, folder=tmp_path).strip() == "2"


@pytest.mark.heavy
def test_the_methods_core_needs_torch_and_nothing_heavier(unpacked: Path, tmp_path: Path) -> None:
    """Neither beside an older transformers, whose import would fail as here, nor without it."""
    for name in HEAVIER:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name}')\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import torch
import cepo.algorithms, cepo.losses
assert "cepo" in cepo.algorithms.available_estimators()
print([name for name in {HEAVIER} if name in sys.modules])
"""
    assert python(code, packages=unpacked, folder=tmp_path).strip() == "[]"
