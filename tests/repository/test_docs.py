"""Pages that are generated from the code, links between pages, and the stations of a prompt that docs/architecture.md gives."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from cepo.config.easyr1 import EASYR1_KEYS

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page for pattern in ("*.md", "docs/*.md", "configs/*.md", "examples/*/*.md") for page in REPOSITORY.glob(pattern)
)
WIDTH = 100
STATION = re.compile(r"^(\d+)\. `(cepo/[\w/]+\.py)`: `([\w.]+)` ", re.MULTILINE)
FILES_OF_EASYR1 = {"examples/config.yaml", "scripts/model_merger.py"}


def name_of(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def test_the_images_were_made_from_todays_page() -> None:
    """Remade by scripts/make_images.py."""
    command = [sys.executable, str(REPOSITORY / "scripts" / "make_images.py"), "--check"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"run python3 scripts/make_images.py\n{done.stderr}"


def test_the_generated_pages_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["generate_docs.py", "--check"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(REPOSITORY / "scripts" / "generate_docs.py"), run_name="__main__")
    assert stop.value.code == 0, "run python3 scripts/generate_docs.py"


def test_the_easyr1_page_has_a_row_for_each_of_its_keys() -> None:
    page = (REPOSITORY / "docs" / "from-easyr1.md").read_text(encoding="utf-8").partition("## Every key")[2]
    rows = re.findall(r"^\| `([a-z_.0-9]+)` \|", page, flags=re.MULTILINE)
    assert rows == list(EASYR1_KEYS)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
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
    lost = sorted(name for name in named if not any((root / name).is_file() for root in roots))
    assert not lost or page.name == "CHANGELOG.md", f"{page.name} names {lost}, which do not exist"


def functions_of(source: str) -> set[str]:
    """Names of functions, those of methods behind their class and a dot."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    body = ast.parse(source).body
    found = {node.name for node in body if isinstance(node, kinds)}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, kinds)}
    return found


def test_a_prompts_stations_are_functions_that_exist() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split("## The path of one prompt\n")[1].split("\n## ")[0]
    stations = STATION.findall(section)
    assert [int(number) for number, _, _ in stations] == list(range(1, 13))
    assert len(stations) == len(re.findall(r"^\d+\. ", section, re.MULTILINE))
    missing = [
        f"{file}: {name}"
        for _, file, name in stations
        if name not in functions_of((REPOSITORY / file).read_text(encoding="utf-8"))
    ]
    assert not missing, "\n".join(missing)
