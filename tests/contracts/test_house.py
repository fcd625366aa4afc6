"""The rules of the house: who may import whom, who knows a method's name, how long things may get."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import cepo
from cepo.algorithms import available_estimators

PACKAGE = Path(cepo.__file__).resolve().parent
REPOSITORY = PACKAGE.parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# A unit may import units of its own level and of lower ones. A module at the package's root that is not named here
# (a command, the composition root) stands on top.
LEVELS = {
    "types": 0, "sections": 0, "trees": 0, "metrics": 0, "errors": 0, "foreign_files": 0, "interrupts": 0, "leftovers": 0,
    "progress": 0, "live_view": 0, "terminal": 0,
    "algorithms": 1, "losses": 1,
    "config": 2,
    "data": 3, "hardware": 3, "models": 3, "rewards": 3, "tracking": 3,
    "microgeo": 4, "rollout": 4, "sizing": 4, "workers": 4,
    "trainer": 5, "report": 5, "evaluation": 5,
    "runtime": 6,
    "credit": 7, "doctor": 7, "integrations": 7, "preflight": 7,
    "commands": 8,
}  # fmt: skip
TOP = 8
PURE = {"types", "sections", "metrics", "errors", "algorithms", "losses"}
PURE_LIBRARIES = {"torch", "jaxtyping", "pydantic", "pydantic_core"}
HOMES = {
    "ray": {"runtime"}, "trl": {"integrations"}, "vllm": {"rollout"}, "peft": {"workers", "models", "rollout"},
    "wandb": {"tracking"}, "mlflow": {"tracking"}, "swanlab": {"tracking"}, "trackio": {"tracking"},
}  # fmt: skip
COMMON_STEMS = {"__init__", "__main__"}
HEAVY = ("ray", "vllm", "transformers", "peft", "wandb", "mlflow", "swanlab", "trackio")


def unit_of(file: Path) -> str:
    """`algorithms` for cepo/algorithms/credit.py, `cli` for cepo/cli.py, an empty text for cepo/__init__.py."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def level_of(unit: str, file: Path) -> int:
    if unit not in LEVELS:
        assert not (PACKAGE / unit).is_dir() or unit == "", f"{file}: give the package '{unit}' a level in this table"
    return LEVELS.get(unit, TOP)


@cache
def nodes_of(file: Path) -> Sequence[ast.AST]:
    """All nodes of the file's syntax tree."""
    return [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]


def imports_of(file: Path) -> Iterator[tuple[str, int]]:
    """Every imported module's full name with its line, wherever in the file the import stands."""
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            assert node.module is not None
            yield node.module, node.lineno
            if node.module == "cepo":
                yield from ((f"cepo.{alias.name}", node.lineno) for alias in node.names)


def place(file: Path, line: int) -> str:
    return f"{file.relative_to(REPOSITORY)}:{line}"


def test_imports_point_down_the_table_only() -> None:
    upward = [
        f"{place(file, line)} imports {name}"
        for file in MODULES
        for name, line in imports_of(file)
        if name.startswith("cepo.") and level_of(name.split(".")[1], file) > level_of(unit_of(file), file)
    ]
    assert not upward, "\n".join(upward)


def modules_named(file: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """The package's modules that a file imports: `from cepo.models import head` names `cepo.models.head`."""
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else str(node.module) for name in inner if str(node.module) in known)


def test_there_is_no_circle_of_imports_between_modules_or_rooms() -> None:
    files = {dotted(file): file for file in MODULES}
    modules = {name: set(modules_named(file, files)) for name, file in files.items()}
    rooms: dict[str, set[str]] = {}
    for name, others in modules.items():
        room = unit_of(files[name])
        rooms.setdefault(room, set()).update({unit_of(files[other]) for other in others} - {room, ""})
    for graph in (modules, rooms):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_file_name_stands_in_two_rooms() -> None:
    homes: dict[str, list[str]] = {}
    for file in MODULES:
        homes.setdefault(file.stem, []).append(str(file.relative_to(REPOSITORY)))
    shared = {stem: found for stem, found in homes.items() if len(found) > 1 and stem not in COMMON_STEMS}
    assert not shared, shared


def test_pure_packages_import_torch_jaxtyping_and_pydantic_alone() -> None:
    allowed = PURE_LIBRARIES | set(sys.stdlib_module_names) | {"cepo"}
    foreign = [
        f"{place(file, line)} imports {name}"
        for file in MODULES
        if unit_of(file) in PURE
        for name, line in imports_of(file)
        if name.split(".")[0] not in allowed
    ]
    assert not foreign, "\n".join(foreign)


def test_each_engine_is_imported_in_its_own_folder_only() -> None:
    abroad = [
        f"{place(file, line)} imports {name}"
        for file in MODULES
        for name, line in imports_of(file)
        if (library := name.split(".")[0]) in HOMES and unit_of(file) not in HOMES[library]
    ]
    assert not abroad, "\n".join(abroad)


def dotted(file: Path) -> str:
    return ".".join(file.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


def test_reading_a_config_or_the_trainer_loads_no_engine() -> None:
    """A config, the list of methods and the doctor's look at versions, which may find a library missing, need no torch."""
    script = """
    import sys, importlib, cepo
    def load(names):
        for name in names.split(): importlib.import_module(name)
    load({config!r})
    from cepo.algorithms import available_estimators, build_config
    [build_config(name, None) for name in available_estimators()]
    cepo.config.dump_config(cepo.load_config("microgeo/quickstart"))
    print(*sys.modules)
    load({others!r})
    print(*sys.modules)
    """
    config = ["cepo.doctor", *(dotted(file) for file in MODULES if unit_of(file) == "config")]
    others = [dotted(file) for file in MODULES if unit_of(file) in PURE | {"trainer"}]
    assert "cepo.algorithms.credit" in others
    script = textwrap.dedent(script).format(config=" ".join(config), others=" ".join(others))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    by_config, by_all = (set(line.split()) for line in done.stdout.splitlines())
    assert not by_config & {"torch", "numpy", "pyarrow", "pandas", "datasets", *HEAVY}
    assert not by_all & set(HEAVY)


def test_no_module_outside_algorithms_knows_a_methods_name() -> None:
    names = set(available_estimators()) - set(OTHER_MEANINGS)
    word = re.compile(rf"\b({'|'.join(sorted(names))})\b")
    found = [
        f"{place(file, number)}: {line.strip()}"
        for file in MODULES
        if unit_of(file) != "algorithms"
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if word.search(line)
    ]
    for folder in ("scripts", "lab"):
        programs = [path for path in sorted((REPOSITORY / folder).rglob("*")) if path.suffix in (".py", ".sh")]
        programs = [path for path in programs if path.parent.name != "tests"]
        assert programs, f"{folder} holds no program"
        found += [
            str(path.relative_to(REPOSITORY)) for path in programs if word.search(path.read_text(encoding="utf-8"))
        ]
    assert not found, "\n".join(found)


OTHER_MEANINGS = ("cepo", "visual")
"""Methods whose name is the package's too, or that of a part of models."""


def decisions_on_own_name(source: str) -> Iterator[int]:
    """Lines where a name with another meaning is compared, looked up or matched as a method's name."""
    about_methods = re.compile("estimator|method|algorithm")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Match):
            about, below = node.subject, [each for case in node.cases for each in ast.walk(case.pattern)]
        elif isinstance(node, ast.Compare | ast.Subscript | ast.Call):
            # Two levels reach the entries of a tuple that something is compared with.
            about, direct = node, list(ast.iter_child_nodes(node))
            below = direct + [each for child in direct for each in ast.iter_child_nodes(child)]
        else:
            continue
        own_name = any(isinstance(each, ast.Constant) and each.value in OTHER_MEANINGS for each in below)
        if own_name and about_methods.search(ast.unparse(about)):
            yield node.lineno


def test_no_module_outside_algorithms_decides_by_such_a_name() -> None:
    found = [
        place(file, line)
        for file in MODULES
        if unit_of(file) != "algorithms"
        for line in decisions_on_own_name(file.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_the_search_for_decisions_on_a_name_sees_5_of_5() -> None:
    """It lets 3 uses of the package's name pass."""
    deciding = [
        "if config.adv_estimator == 'cepo': pass",
        "if method in ('other', 'cepo'): pass",
        "section = config.methods['cepo']",
        "build_estimator('cepo')",
        "match adv_estimator:\n    case 'other' | 'cepo': pass",
    ]
    passing = ["logger = getLogger('cepo')", "inside = path.parts[0] == 'cepo'", "versions = {'cepo': version}"]
    assert [source for source in deciding + passing if list(decisions_on_own_name(source))] == deciding


SIZED = [file for folder in ("cepo", "scripts", "lab", "examples") for file in (REPOSITORY / folder).rglob("*.py")]


def test_modules_have_at_most_400_lines() -> None:
    lengths = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in SIZED}
    long = [f"{place(file, 1)} has {length} lines" for file, length in lengths.items() if length > 400]
    assert not long, "\n".join(long)


def test_functions_have_at_most_60_lines() -> None:
    long = [
        f"{place(file, node.lineno)} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for file in SIZED
        for node in nodes_of(file)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > 60
    ]
    assert not long, "\n".join(long)


def test_the_library_never_prints() -> None:
    printing = [
        place(file, node.lineno)
        for file in MODULES
        for node in nodes_of(file)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not printing, "\n".join(printing)


def test_names_of_tests_have_at_most_60_characters() -> None:
    long = [
        f"{file.relative_to(REPOSITORY)}: {name}"
        for file in sorted((REPOSITORY / "tests").rglob("*.py"))
        for name in re.findall(r"^ *def (test_\w{56,})", file.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert not long, "\n".join(long)


def test_nothing_in_the_package_imports_the_lab() -> None:
    assert [(file, line) for file in MODULES for name, line in imports_of(file) if name.split(".")[0] == "lab"] == []
