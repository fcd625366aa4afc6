"""Adds the pages of the repository's root to the documentation site and rewrites links that leave docs/.

The pages in docs/ link to each other by file name, and to files outside docs/ by `../`. On the site, the three pages of
the root are next to those of docs/. Links to other files (scripts, examples) become their paths in the repository.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).resolve().parent.parent
ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of the repository's root."""
    for source, target in ROOT_PAGES.items():
        text = (REPOSITORY / source).read_text(encoding="utf-8")
        for beginning in ("](", 'src="', 'srcset="'):
            text = text.replace(f"{beginning}docs/", beginning)
        files.append(File.generated(config, target, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Converts links out of docs/ to links between pages of the site, or to paths in the repository."""
    return _LINK.sub(
        lambda match: _on_site(*match.groups(), at_root=page.file.src_uri in ROOT_PAGES.values()), markdown
    )


def _on_site(text: str, target: str, anchor: str | None, *, at_root: bool) -> str:
    link = f"[{text}]({target}{anchor or ''})"
    if target.startswith(("https://", "http://", "mailto:")):
        return link
    path = target.removeprefix("../")
    if not at_root and path == target:
        return link
    if path in ROOT_PAGES:
        return f"[{text}]({ROOT_PAGES[path]}{anchor or ''})"
    if at_root and (REPOSITORY / "docs" / path).exists():
        return link
    return text if text.strip("`") == path else f"{text} (`{path}`)"
