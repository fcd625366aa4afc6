"""Reads settings from YAML files, which may name a base file, and `a.b.c=value` arguments; records file and line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cepo.config.arguments import settings_in
from cepo.config.paths import find_base_file, find_config_file, find_path, near_config_name, searched
from cepo.errors import ConfigError, DataError, near_path
from cepo.files.safe_files import read_text
from cepo.files.trees import Tree, is_mapping, leaves
from cepo.sections.reader import SectionError, read_section

_Section = TypeVar("_Section")
_MERGE_TAG = "tag:yaml.org,2002:merge"
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_YAML_REMEDIES = {
    "found unknown escape character": "Write a path of Windows in single quotes",
    "found character '@'": "Write quotes around a value that begins with it",
    "found character '%'": "Write quotes around a value that begins with it",
    "found character '`'": "Write quotes around a value that begins with it",
    "found unhashable key": "Write quotes around a value that begins with braces",
    "mapping values are not allowed here": "Write quotes around a value with a colon, or mend the indentation",
    "but found another document": "A file has one document: leave out the line ---",
}
"""What to write in place of what YAML does not read, by the beginning of its problem."""


@dataclass(frozen=True)
class Origins:
    """The place that last set each dotted key; `arguments` holds the text after `=` of command-line arguments."""

    places: dict[str, str] = field(default_factory=dict[str, str])
    arguments: dict[str, str] = field(default_factory=dict[str, str])

    def update(self, other: Origins) -> None:
        for key in other.places:
            self.arguments.pop(key, None)
        self.places.update(other.places)
        self.arguments.update(other.arguments)

    def place_of(self, key: str) -> str | None:
        """Returns the place that set `key`, or else its nearest enclosing section."""
        key = key.split("[")[0]
        while key and key not in self.places:
            key = key.rpartition(".")[0]
        return self.places.get(key)

    def error(self, key: str, message: str) -> ConfigError:
        place = self.place_of(key)
        return ConfigError(message if place is None else f"{place}: {message}")

    def read(self, kind: type[_Section], tree: object, *, path: str = "") -> _Section:
        """Calls `read_section` and adds to each fault its file and line, or its argument.

        A value that no source sets can be wrong only by following another setting, whose fault is reported in its place.
        """
        try:
            return read_section(kind, tree, path=path, texts=self.arguments)
        except SectionError as error:
            faults = [fault for fault in error.faults if fault.rank != 1 or fault.key.split("[")[0] in self.places]
            messages = [str(self.error(fault.key, fault.message)) for fault in faults or error.faults]
            raise ConfigError("\n".join(messages)) from None


@dataclass(frozen=True)
class Source:
    """One file or argument: its settings, with interpolations unresolved, and the places of its keys."""

    tree: Tree
    origins: Origins


def read_files(path: str) -> list[Source]:
    """Returns the sources of `config=path`: the chain of its base files, then the file itself."""
    file = find_config_file(path)
    if file is None:
        folder = find_path(path)
        if folder is not None and folder.is_dir():
            names = sorted(entry.name for entry in folder.glob("*.y*ml"))
            raise ConfigError(
                f"config={path} is a folder; name a YAML file. Those in it: {', '.join(names) or 'none'}."
            )
        near = near_config_name(path) or near_path(path)
        raise ConfigError(
            f"config={path}: there is no such file ({searched(path)}).{near} The shipped configurations have names such as "
            "geo3k/cepo."
        )
    sources: list[Source] = []
    visited: list[Path] = []
    while file is not None:
        target = file.resolve()
        is_circle = target in visited
        visited.append(target)
        if is_circle:
            raise ConfigError(f"{file}: base files name one another in a circle: {' -> '.join(map(str, visited))}.")
        source, file = read_file(file)
        sources.insert(0, source)
    return sources


def read_file(path: Path, *, within: Path | None = None) -> tuple[Source, Path | None]:
    """Reads one YAML file; returns it without its `base` key, and the base file named there.

    Raises `ConfigError` if it breaks the policy of `cepo.files.safe_files` (`within` as there), or is not a YAML mapping.
    """
    try:
        text = read_text(path, within=within)
        root: Any = yaml.SafeLoader(text).get_single_node()
        tree: Any = {}
        if isinstance(root, yaml.MappingNode):
            tree = OmegaConf.to_container(OmegaConf.create(text))
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = str(error.problem)
        remedy = next((f" {remedy}." for begin, remedy in _YAML_REMEDIES.items() if problem.startswith(begin)), "")
        raise ConfigError(f"{path}{line}: this is not valid YAML: {problem}.{remedy}") from error
    except DataError as error:
        raise ConfigError(f"{error}; give a YAML file.") from error
    except (ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        reason = error if within is None else type(error).__name__
        raise ConfigError(f"{path}: cannot be read as a YAML file: {reason}.") from error
    if not isinstance(root, yaml.MappingNode | None):
        raise ConfigError(
            f"{path}: a config file must have sections with keys (`data:`, `worker:`, ...), got a list or a text."
        )
    places: dict[str, str] = {}
    _collect_lines(root, "", str(path), places)
    base = tree.pop("base", None)
    if base is None:
        return Source(tree, Origins(places)), None
    if not isinstance(base, str):
        raise ConfigError(f"{places['base']}: base must be the path of a YAML file, got {base!r}.")
    base_file = find_base_file(path.parent, base)
    if base_file is None:
        near = near_config_name(base)
        raise ConfigError(
            f"{places['base']}: base file {base} does not exist.{near} Looked for {path.parent / base}, and among the shipped "
            "configurations, whose names are such as microgeo/base."
        )
    return Source(tree, Origins(places)), base_file


def _collect_lines(node: yaml.Node | None, prefix: str, file: str, places: dict[str, str]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        if key_node.tag == _MERGE_TAG:
            _collect_lines(value_node, prefix, file, places)
            continue
        key = f"{prefix}{key_node.value}"
        places[key] = f"{file}, line {key_node.start_mark.line + 1}"
        _require_decimal(value_node, places[key])
        _collect_lines(value_node, f"{key}.", file, places)


def _require_decimal(node: yaml.Node | None, place: str) -> None:
    """Raises `ConfigError` for a number such as 1:30, which YAML reads as one of base 60, 90."""
    if isinstance(node, yaml.ScalarNode) and node.tag in _NUMBERS and ":" in node.value:
        raise ConfigError(
            f"{place}: {node.value} is a number of base 60 in YAML. Write it in decimals, or a text in quotes."
        )


def read_argument(argument: str) -> Source:
    """Returns the source of one setting `a.b.c=value`; raises `ConfigError` for an invalid value."""
    key, _, value = argument.partition("=")
    if not value:
        raise ConfigError(
            f"argument '{argument}': nothing follows the equals sign, as with a variable that the shell does not know. Write "
            f"{key}=null for no value"
        )
    try:
        tree = cast("Tree", OmegaConf.to_container(OmegaConf.from_dotlist([argument])))
        node = cast("Any", yaml).compose(value, Loader=yaml.SafeLoader)  # the function has no types
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error)  # only some errors have this attribute
        raise ConfigError(
            f"argument '{argument}': the value is not valid YAML: {problem}. Write a text with special characters in quotes "
            f"within quotes: {key}='\"...\"'"
        ) from error
    except (OmegaConfBaseException, ValueError, TypeError, AssertionError, RecursionError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"argument '{argument[:200]}': {reason}.") from error
    _require_decimal(node, f"argument {argument!a}")
    if _ends_in_comment(value, node):
        raise ConfigError(
            f"argument {argument!a}: what follows '#' is a comment in YAML and would be left out; quote the value as in "
            """'key="a #b"'."""
        )
    for name, entry in leaves(tree):
        entry_name, colon, entry_value = name.rpartition(".")[2].partition(":")
        if entry is None and colon:
            raise ConfigError(
                f"argument {argument!a}: YAML needs a blank after the colon of an entry: '{key}={{{entry_name}: {entry_value}}}'"
            )
    places: dict[str, str] = {}
    _collect_argument_keys(tree, "", f"argument '{argument}'", places)
    return Source(tree, Origins(places, {key: value}))


def _ends_in_comment(value: str, node: yaml.Node | None) -> bool:
    """Returns whether YAML leaves out the end of a text, or all of it, because it begins with `#`."""
    remainder = value if node is None else value[node.end_mark.index :]
    return remainder.lstrip().startswith("#")


def _collect_argument_keys(node: object, prefix: str, place: str, places: dict[str, str]) -> None:
    if is_mapping(node):
        for key, value in node.items():
            places[f"{prefix}{key}"] = place
            _collect_argument_keys(value, f"{prefix}{key}.", place, places)


def read_arguments(argv: Sequence[str], explained: Callable[[str, str], str]) -> list[Source]:
    """Returns a command line's sources, of which later ones override: base files, the file of `config=`, arguments.

    `explained` is that of `settings_in`.
    """
    if not argv:
        raise ConfigError(
            "nothing is configured: give config=FILE, for example config=configs/microgeo/base.yaml, and settings a.b.c=value"
        )
    settings = settings_in(argv, explained)
    files = [setting.removeprefix("config=") for setting in settings if setting.startswith("config=")]
    if len(files) > 1:
        raise ConfigError(
            f"config= is given {len(files)} times: {', '.join(files)}. Name one file; it may have a `base:`."
        )
    sources: list[Source] = []
    if files:
        sources += read_files(files[0])
    for setting in settings:
        if not setting.startswith("config="):
            sources.append(read_argument(setting))
    return sources
