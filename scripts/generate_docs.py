"""Writes the tables of four pages and configs/schema.json from the code: `generate_docs.py [--check]`."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from cepo.algorithms import available_estimators, estimator_class
from cepo.algorithms.registry import METHODS as METHOD_CLASSES
from cepo.algorithms.settings import SharedSettings
from cepo.config import RunConfig, load_config
from cepo.config.easyr1 import EASYR1_KEYS, TABLE, engine_key_of
from cepo.config.listing import REQUIRED, Setting, all_settings, method_settings, settings_of
from cepo.config.schema import RunSettings
from cepo.files.trees import Tree, leaves
from cepo.models.families import FAMILIES
from cepo.sections.messages import written
from cepo.sections.reader import default_tree
from cepo.workers.memory import ModelShape, estimate_memory, fit, shape_of
from testing.published_models import PUBLISHED_SIZES, published_config

DOCS = Path(__file__).resolve().parent.parent / "docs"


def rows(settings: Iterable[Setting]) -> Iterator[str]:
    """Yields table rows of settings with their meaning."""
    for one in settings:
        yield f"| `{one.key}` | {_default(one)} | {_cell(one.accepted)} | {_cell(one.help)} |"


def declared_settings() -> list[Setting]:
    """Returns all settings, each declaration once: the critic's settings are the actor's where nothing but the key differs."""
    found = {setting.key: setting for setting in all_settings()}

    def is_the_actors(setting: Setting) -> bool:
        actors = setting.key.replace("worker.critic.", "worker.actor.")
        return actors != setting.key and found.get(actors) == replace(setting, key=actors)

    return [setting for setting in found.values() if not is_the_actors(setting)]


def configuration_tables() -> dict[str, list[str]]:
    """Returns the generated blocks of the page on settings: those of all methods, what each method reads, and its own."""
    of_methods = {setting.key for name in available_estimators() for setting in method_settings(name)}
    shared = [setting for setting in declared_settings() if setting.key not in of_methods]
    own = [setting for name in available_estimators() for setting in method_settings(name)]
    head = ["| key | default | accepts | meaning |", "| --- | --- | --- | --- |"]
    methods = ["| method | reads | presets |", "| --- | --- | --- |", *map(_method_row, available_estimators())]
    return {"settings": [*head, *rows(shared)], "methods": methods, "settings of methods": [*head, *rows(own)]}


def _method_row(name: str) -> str:
    presets, defaults = METHOD_CLASSES.presets_of(name), dict(leaves(default_tree(SharedSettings)))
    read = ", ".join(f"`{section}`" for section in presets) or "nothing"
    own = ", ".join(f"`{key}={written(value)}`" for key, value in leaves(presets) if key and value != defaults[key])
    return f"| `{name}` | {read} | {own} |"


def easyr1_rows() -> Iterator[str]:
    """Yields table rows of those of EasyR1's keys that have another default or meaning here."""
    ours = {setting.key: setting.default for setting in settings_of()}
    for name, key in EASYR1_KEYS.items():
        shipped = f"`{written(key.shipped[0])}`" if key.shipped else ""
        if engine_key_of(name) is not None:
            continue
        if name in TABLE.other_default:
            here = (
                f"{'required' if ours[name] is REQUIRED else f'`{written(ours[name])}`'}: {TABLE.other_default[name]}"
            )
        elif name in TABLE.other_meaning:
            here = f"same default: {TABLE.other_meaning[name]}"
        else:
            continue
        yield f"| `{name}` | {_code(key.default)} | {shipped} | {_cell(here)} |"


def keys_without_effect() -> Iterator[str]:
    """Yields for each reason one line with EasyR1's keys that have no effect here."""
    keys_of: dict[str, list[str]] = {}
    for name in EASYR1_KEYS:
        entry = engine_key_of(name)
        if entry is not None:
            only = "" if entry.only is None else f" (must be `{written(entry.only)}`)"
            keys_of.setdefault(entry.why, []).append(f"`{name}`{only}")
    for reason, keys in keys_of.items():
        yield f"- {reason}: {', '.join(keys)}"


def easyr1_tables() -> dict[str, list[str]]:
    """Returns the generated blocks of the page for users of EasyR1."""
    return {
        "keys": [
            "| key | EasyR1's default | in its `config.yaml` | here |",
            "| --- | --- | --- | --- |",
            *easyr1_rows(),
        ],
        "without effect": [*keys_without_effect()],
        "internal": [", ".join(f"`{name}`" for name in TABLE.internal) + "."],
    }


_DIALECT = "https://json-schema.org/draft/2020-12/schema"
CARDS = (24, 48, 80, 96, 141, 180)
"""Memory of the cards in the table, in GB of 10^9 bytes; the driver takes half a GB."""
RESPONSES = (2048, 4096, 8192)
_LORA = "worker.actor.model.lora"
_TRAINED = {
    "LoRA": [f"{_LORA}.rank=16"],
    "QLoRA": [f"{_LORA}.rank=16", f"{_LORA}.quantization=nf4"],
    "all weights": [f"{_LORA}.rank=0"],
}


@cache
def published_shape(size: str) -> ModelShape:
    return shape_of(published_config(size))


def family_lines() -> list[str]:
    """Returns the Markdown table of families and the reasons why some families need padded rows."""
    lines = ["| model | `model_type` | images | videos | path |", "| --- | --- | --- | --- | --- |"]
    reasons: dict[str, list[str]] = {}
    for family in FAMILIES:
        cells = [
            family.title,
            ", ".join(f"`{model_type}`" for model_type in family.model_types),
            "yes" if family.reads_images else "",
            "yes" if family.reads_videos else "",
            "packed" if family.packs else "padded",
        ]
        lines.append(f"| {' | '.join(cells)} |")
        if not family.packs:
            reasons.setdefault(family.why_padded, []).append(family.title)
    return [*lines, "", *(f"- {', '.join(titles)}: {reason}." for reason, titles in reasons.items())]


def memory_table() -> list[str]:
    """Returns lines of Markdown: the rows of an update pass for which a card has room in the paper's setting."""
    lines = [
        f"| model | trained | {' | '.join(f'{card} GB' for card in CARDS)} |",
        f"| --- | --- |{' --- |' * len(CARDS)}",
    ]
    for size in PUBLISHED_SIZES:
        for trained, settings in _TRAINED.items():
            configs = [
                load_config(["config=configs/geo3k/cepo.yaml", f"data.max_response_length={response}", *settings])
                for response in RESPONSES
            ]
            cells: list[str] = []
            for card in CARDS:
                rows = [memory_cell(config, size, card * 10**9) for config in configs]
                cells.append(rows[0] if len(set(rows)) == 1 else ", ".join(rows))
            lines.append(f"| {size} | {trained} | {' | '.join(cells)} |")
    return lines


def memory_cell(config: RunConfig, size: str, total: int) -> str:
    """Returns the largest of 16, 8, 4, 2, 1 rows that fit, after another share for vLLM where its share does not."""
    for rows in (16, 8, 4, 2, 1):
        actor = replace(
            config.worker.actor,
            micro_batch_size_per_device_for_update=rows,
            micro_batch_size_per_device_for_experience=4 * rows,
        )
        changed = replace(config, worker=replace(config.worker, actor=actor))
        memory = estimate_memory(changed, with_vllm=True, shape_of_model=lambda model: published_shape(size))
        usual = config.worker.rollout.gpu_memory_utilization
        for share in (usual, *(twentieth / 20 for twentieth in range(19, 0, -1))):
            rollout = replace(config.worker.rollout, gpu_memory_utilization=share)
            if fit(memory, rollout, free=total - 500_000_000, total=total) == (None, 0):
                return str(rows) if share == usual else f"{share:g}: {rows}"
    return "no"


def with_tables(page: Path, blocks: Mapping[str, Sequence[str]]) -> str:
    """Returns the page with each block between two markers replaced by its rows."""
    text = page.read_text(encoding="utf-8")
    for name, lines in blocks.items():
        begin, end = f"<!-- {name}: begin, generated -->", f"<!-- {name}: end -->"
        block = "\n".join([begin, *(wrapped(line) for line in lines), end])
        text, count = re.subn(f"{begin}.*?{end}", lambda _, block=block: block, text, flags=re.DOTALL)
        assert count == 1, f"{page.name} has {count} blocks '{name}'"
    return text


def wrapped(line: str) -> str:
    """Wraps a line of prose or of a list at 100 columns; leaves table rows unchanged."""
    if line.startswith("|"):
        return line
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _default(setting: Setting) -> str:
    return f"`{setting.written_default}`" if setting.written_default is not None else "required"


def _code(value: Any) -> str:
    return '`""`' if value == "" else f"`{written(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def file_schema() -> Tree:
    """Returns the JSON schema for editors, with the own settings of all registered methods.

    No key is required, because a file may extend another one; a reference `${...}` is accepted for any value, and unknown
    sections of `algorithm` for the methods of plug-ins.
    """
    schema = TypeAdapter(RunSettings).json_schema()
    definitions = schema["$defs"]
    for name in available_estimators():
        nodes = TypeAdapter(estimator_class(name).Config).json_schema().get("properties", {})
        properties = {field: nodes[field] for field in METHOD_CLASSES.own_fields(name)}
        if properties:
            definitions[f"algorithm.{name}"] = {
                "type": "object",
                "additionalProperties": False,
                "properties": properties,
            }
            definitions["AlgorithmConfig"]["properties"][name] = {"$ref": f"#/$defs/algorithm.{name}"}
    for section in (schema, *definitions.values()):
        section.pop("required", None)
        section["properties"] = {name: _or_reference(node) for name, node in section.get("properties", {}).items()}
    definitions["AlgorithmConfig"]["additionalProperties"] = {"type": "object"}
    definitions["Reference"] = {
        "type": "string",
        "pattern": "^\\$\\{.+\\}$",
        "description": "The value of another setting.",
    }
    base = {"base": {"type": "string", "description": "YAML file that this one builds on, relative to its folder."}}
    properties = {**base, **schema["properties"]}
    return {**schema, "$schema": _DIALECT, "title": "A run of cepo", "properties": properties}


def _or_reference(node: Tree) -> Tree:
    """Allows a reference in place of a setting's value, and removes the title that pydantic derives from its name."""
    annotations = {key: node[key] for key in ("default", "description") if key in node}
    value_schema = {key: entry for key, entry in node.items() if key not in ("default", "description", "title")}
    if "$ref" in value_schema or value_schema == {"type": "string"}:
        return {**annotations, **value_schema}
    alternatives = value_schema.get("anyOf", [value_schema])
    return {**annotations, "anyOf": [*alternatives, {"$ref": "#/$defs/Reference"}]}


def main() -> int:
    """Writes the pages; with --check, returns 1 instead if they are out of date."""
    blocks = {
        "configuration.md": configuration_tables(),
        "from-easyr1.md": easyr1_tables(),
        "gpus.md": {"memory": memory_table()},
        "models.md": {"families": family_lines()},
    }
    pages = {DOCS / name: with_tables(DOCS / name, tables) for name, tables in blocks.items()}
    pages[DOCS.parent / "configs" / "schema.json"] = json.dumps(file_schema(), indent=1) + "\n"
    if "--check" in sys.argv[1:]:
        return (
            0 if all(page.is_file() and page.read_text(encoding="utf-8") == text for page, text in pages.items()) else 1
        )
    for page, text in pages.items():
        page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
