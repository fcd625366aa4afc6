"""Pages that are generated from the code, and links between pages."""

from __future__ import annotations

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
def test_links_lead_to_files_that_exist(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    for target in targets:
        assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_wrap_at_100_columns(page: Path) -> None:
    """Rows of tables are excepted, and lines of one word (a long link), which cannot wrap."""
    lines = page.read_text(encoding="utf-8").splitlines()
    long = [
        f"{page.name}:{number} has {len(line)} columns"
        for number, line in enumerate(lines, start=1)
        if len(line) > WIDTH and not line.startswith("|") and " " in line.strip()
    ]
    assert not long, "\n".join(long)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: str(page.relative_to(REPOSITORY))
)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"`([a-z_0-9/]+/[a-z_0-9]+\.(?:py|sh|yaml|yml|jinja))`", page.read_text(encoding="utf-8")))
    roots = [REPOSITORY, *(REPOSITORY / name for name in ("cepo", "configs", "tests"))]
    lost = sorted(name for name in named - FILES_OF_EASYR1 if not any((root / name).is_file() for root in roots))
    assert not lost, f"{page.name} names {lost}, which do not exist"
