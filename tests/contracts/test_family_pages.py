"""A model family is known on its own page alone."""

from __future__ import annotations

import re
from pathlib import Path

import cepo
from cepo.models.families import FAMILIES

PACKAGE = Path(cepo.__file__).parent
OWN_MODEL = {"microgeo"}
"""The embedded world builds a tiny model of one family, with that family's classes."""

SPOKEN_OF = {"fused_decoding.py"}
"""Names the decoder classes whose layers it computes; whether it is asked at all is the family's word."""


def test_only_families_know_model_types_and_architectures() -> None:
    types = {re.escape(model_type) for family in FAMILIES for model_type in family.model_types}
    quoted = re.compile(rf"""["']({"|".join(sorted(types))})["']""")
    classes = re.compile(
        r"\b(Qwen\w*VL\w*|InternVL\w*|SmolVLM\w*|Idefics3\w*|Gemma3\w*|Llava\w*)(Model|For|Config|Processor)\w*"
    )
    found = [
        f"{file.relative_to(PACKAGE)}: {line.strip()}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if "families" not in file.parts and not OWN_MODEL & set(file.parts) and file.name not in SPOKEN_OF
        for line in file.read_text(encoding="utf-8").splitlines()
        if quoted.search(line) or classes.search(line)
    ]
    assert not found, "\n".join(found)


def test_every_page_is_registered_and_no_model_type_stands_twice() -> None:
    pages = {f"cepo.models.families.{file.stem}" for file in (PACKAGE / "models" / "families").glob("[!_]*.py")}
    assert {type(family).__module__ for family in FAMILIES if family.reads_images} == pages
    types = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(types) == len(set(types)) >= 18
