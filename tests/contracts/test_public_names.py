"""The public surface: the names that docs/api.md lists, each module's `__all__`, and what the examples import."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions, requires
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cepo.moved import MOVED

REPOSITORY = Path(__file__).resolve().parents[2]
HEADING = re.compile(r"^## .*: `(cepo[\w.]*)`$", re.MULTILINE)
ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \| ", re.MULTILINE)
NEEDS_TRL = "cepo.integrations.trl"
"""Its import needs a library that only the extra `trl` brings."""


def listed_names() -> dict[str, list[str]]:
    """The public names of each module, in the order of the tables of docs/api.md."""
    _, *parts = HEADING.split((REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8"))
    names = {}
    for module, section in zip(parts[::2], parts[1::2], strict=True):
        rows = ROW.findall(section)
        if rows:
            names[module] = re.findall(r"\w+", " ".join(rows))
    return names


LISTED = listed_names()


def imported_names(source: str) -> Iterator[tuple[str, str]]:
    """The pairs (module, name) of the package that a program imports; `import cepo` has the name ''."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "cepo":
            for alias in node.names:
                yield str(node.module), alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "cepo":
                    yield alias.name, ""


def source_of(file: Path) -> str:
    """A program's text; of a notebook, that of its code cells without the lines of the shell."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        return text
    cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    lines = "\n".join(cells).splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith(("!", "%")))


EXAMPLES = sorted(file for suffix in ("py", "ipynb") for file in (REPOSITORY / "examples").rglob(f"*.{suffix}"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: str(file.relative_to(REPOSITORY / "examples")))
def test_an_example_imports_public_names_alone(file: Path) -> None:
    private = [
        f"{module}.{name}".removesuffix(".")
        for module, name in imported_names(source_of(file))
        if name not in ["", *LISTED.get(module, [])] or module not in LISTED
    ]
    assert not private, f"docs/api.md does not list {private}"


@cache
def providers_of_packages() -> Mapping[str, list[str]]:
    return packages_distributions()


@cache
def installed_with_training() -> set[str]:
    """The distributions that `cepo[train]` names, and those that they name themselves without an extra."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = project["dependencies"] + project["optional-dependencies"]["train"]
    distributions = {canonicalize_name(Requirement(text).name) for text in named}
    for name in list(distributions):
        for text in requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                distributions.add(canonicalize_name(requirement.name))
    return distributions


def imported_packages(source: str) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            modules.add(node.module)
    return {module.partition(".")[0] for module in modules}


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: str(file.relative_to(REPOSITORY / "examples")))
def test_an_example_imports_what_training_installs(file: Path) -> None:
    """An example once imported a package that was there by chance, and failed in a fresh environment."""
    own_modules = {file.stem for file in file.parent.glob("*.py")} | {"cepo"}
    third_party = imported_packages(source_of(file)) - own_modules - sys.stdlib_module_names
    provided_by = providers_of_packages()
    installed = installed_with_training()
    optional = {"trl"}  # the pages of these examples name the extra
    for name in third_party - optional:
        providers = {canonicalize_name(distribution) for distribution in provided_by.get(name, [name])}
        assert providers & installed, f"nothing that training installs provides {name}"


def test_the_examples_import_from_most_public_modules() -> None:
    """Otherwise the test above would look at nothing."""
    used = {module for file in EXAMPLES for module, _ in imported_names(source_of(file))}
    assert used >= {"cepo", "cepo.algorithms", "cepo.microgeo", "cepo.rewards", "cepo.types", NEEDS_TRL}


@pytest.mark.parametrize("module", [name for name in LISTED if name != NEEDS_TRL])
def test_the_page_lists_the_names_of_a_public_module(module: str) -> None:
    loaded = importlib.import_module(module)
    assert sorted(LISTED[module]) == sorted(loaded.__all__)
    assert [name for name in loaded.__all__ if getattr(loaded, name, None) is None] == []


def test_the_package_itself_has_ten_names_and_its_version() -> None:
    assert len(LISTED["cepo"]) == 11


def test_what_is_left_out_of_the_page_is_seen() -> None:
    sources = (
        "import cepo\nimport cepo.metrics\nfrom cepo.types import Rollout\nfrom cepo.answers.equality import near\n"
    )
    assert list(imported_names(sources)) == [
        ("cepo", ""), ("cepo.metrics", ""), ("cepo.types", "Rollout"), ("cepo.answers.equality", "near"),
    ]  # fmt: skip
    assert "cepo.metrics" not in LISTED
    assert "Rollout" in LISTED["cepo.types"]


def test_a_module_has_its_old_name_for_one_release() -> None:
    """The old name is the same module, so that a class under both names is one class."""
    with pytest.warns(DeprecationWarning, match=r"cepo\.data\.contexts is now cepo\.data\.prompts"):
        old = importlib.import_module("cepo.data.contexts")
    new = importlib.import_module("cepo.data.prompts")
    assert old is new
    assert new.__spec__.name == "cepo.data.prompts"


@pytest.mark.parametrize("name", MOVED.values())
def test_a_moved_module_exists_under_its_new_name(name: str) -> None:
    assert find_spec(f"cepo.{name}") is not None
