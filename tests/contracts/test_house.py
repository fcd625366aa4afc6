"""The rules of the house: who may import whom, who knows a method's name, how long a function may get."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import cepo
from cepo.algorithms import available_estimators
from cepo.models import families
from cepo.models.families import FAMILIES

PACKAGE = Path(cepo.__file__).resolve().parent
REPOSITORY = PACKAGE.parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# A unit may import units of its own level and of lower ones. A module at the package's root that is not named here
# (a command, the composition root) stands on top.
LEVELS = {
    "answers": 0, "errors": 0, "files": 0, "metrics": 0, "sections": 0, "terminal": 0, "types": 0,
    "algorithms": 1, "hardware": 1, "losses": 1, "run_folder": 1,
    "config": 2,
    "data": 3, "models": 3, "rewards": 3,
    "microgeo": 4, "rollout": 4, "workers": 4,
    "evaluation": 5, "report": 5, "trainer": 5,
    "runtime": 6,
    "credit": 7, "integrations": 7, "look": 7,
    "commands": 8,
}  # fmt: skip
TOP = 8
PURE = {"types", "sections", "metrics", "errors", "algorithms", "losses"}
PURE_LIBRARIES = {"torch", "jaxtyping", "pydantic", "pydantic_core"}
HOMES = {
    "ray": {"runtime"}, "trl": {"integrations"}, "vllm": {"rollout"}, "peft": {"workers", "models", "rollout"},
    "wandb": {"run_folder"}, "mlflow": {"run_folder"}, "swanlab": {"run_folder"}, "trackio": {"run_folder"},
}  # fmt: skip
HEAVY = ("ray", "vllm", "transformers", "peft", "wandb", "mlflow", "swanlab", "trackio")


def unit_of(file: Path) -> str:
    """`algorithms` for cepo/algorithms/statistics.py, `train` for cepo/train.py, an empty text for cepo/__init__.py."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def level_of(unit: str, file: Path) -> int:
    if unit not in LEVELS:
        assert not (PACKAGE / unit).is_dir() or unit == "", f"{file}: give the package '{unit}' a level in this table"
    return LEVELS.get(unit, TOP)


def lines_that_match(pattern: re.Pattern[str], files: Sequence[Path]) -> list[str]:
    matches: list[str] = []
    for file in files:
        lines = file.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, start=1):
            if pattern.search(line):
                matches.append(f"{place(file, number)}: {line.strip()}")
    return matches


@cache
def nodes_of(file: Path) -> Sequence[ast.AST]:
    """All nodes of the file's syntax tree."""
    return [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]


def imports_of(file: Path) -> Iterator[tuple[str, int]]:
    """Every imported module's full name with its line, wherever in the file the import stands."""
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            assert node.module is not None
            yield node.module, node.lineno
            if node.module == "cepo":
                for alias in node.names:
                    yield f"cepo.{alias.name}", node.lineno


def place(file: Path, line: int) -> str:
    return f"{file.relative_to(REPOSITORY)}:{line}"


def imports_where(wrong: Callable[[Path, str], bool]) -> str:
    """The imports of the package for which `wrong(file, name of the imported module)` holds, a line for each."""
    wrong_imports: list[str] = []
    for file in MODULES:
        for name, line in imports_of(file):
            if wrong(file, name):
                wrong_imports.append(f"{place(file, line)} imports {name}")
    return "\n".join(wrong_imports)


def test_imports_point_down_the_table_only() -> None:
    def upward(file: Path, name: str) -> bool:
        return name.startswith("cepo.") and level_of(name.split(".")[1], file) > level_of(unit_of(file), file)

    assert not imports_where(upward)


COMPANIONS = {"report", "evaluation", "credit", "integrations", "look", "microgeo"}
"""Rooms that read run folders or call the trainer. The modules at the package's root and the commands lead to them."""


def test_no_room_of_the_trainer_imports_a_companion() -> None:
    companions = tuple(f"cepo.{name}" for name in COMPANIONS)

    def from_below(file: Path, name: str) -> bool:
        is_in_a_room = file.parent != PACKAGE
        is_of_the_trainer = unit_of(file) not in COMPANIONS | {"commands"}
        return is_in_a_room and is_of_the_trainer and name.startswith(companions)

    assert not imports_where(from_below)


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
    for name, imported_modules in modules.items():
        room = unit_of(files[name])
        rooms.setdefault(room, set()).update({unit_of(files[module]) for module in imported_modules} - {room, ""})
    for graph in (modules, rooms):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            pytest.fail(" imports ".join(reversed(error.args[1])))


BY_NAME = {"__init__.py", "algorithms/__init__.py", "moved.py"}
"""The names of `cepo` and the methods are imported when they are first used, or found in their folder; old names are those of
other modules."""


def test_no_module_imports_from_a_string() -> None:
    """The other tests of imports would not see it."""
    call = re.compile(r"\b(?:import_module|__import__)\(")
    files = [file for file in MODULES if str(file.relative_to(PACKAGE)) not in BY_NAME]
    lines = lines_that_match(call, files)
    assert not lines, "\n".join(lines)


LOGGERS = ("cepo", "cepo.train", "cepo.commands.evaluate")
"""Names of loggers, which are those of modules."""


def modules_in_strings(file: Path, known: set[str]) -> Iterator[tuple[str, int]]:
    """The modules that a file names in strings, such as `cepo.rewards.worker_process`."""
    for node in nodes_of(file):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]
            if name in known and name not in LOGGERS:
                yield name, node.lineno


def test_a_module_named_in_a_string_lies_in_the_same_room() -> None:
    """A process of its own is started with it, or an engine loads a class from it."""
    known = {dotted(file) for file in MODULES}
    files = [file for file in MODULES if file != PACKAGE / "__init__.py"]
    named = [(file, name, line) for file in files for name, line in modules_in_strings(file, known)]
    assert len(named) >= 2
    abroad = [f"{place(file, line)} names {name}" for file, name, line in named if name.split(".")[1] != unit_of(file)]
    assert not abroad, "\n".join(abroad)


def test_pure_packages_import_torch_jaxtyping_and_pydantic_alone() -> None:
    allowed = PURE_LIBRARIES | set(sys.stdlib_module_names) | {"cepo"}
    assert not imports_where(lambda file, name: unit_of(file) in PURE and name.split(".")[0] not in allowed)


def test_a_class_name_has_one_meaning() -> None:
    """Settings of methods and losses are nested classes of one name, and private names end at their file."""
    files_of: dict[str, list[str]] = {}
    for file in MODULES:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files_of.setdefault(node.name, []).append(str(file.relative_to(PACKAGE)))
    assert {name: files for name, files in files_of.items() if len(files) > 1} == {}


def test_each_engine_is_imported_in_its_own_folder_only() -> None:
    def abroad(file: Path, name: str) -> bool:
        return unit_of(file) not in HOMES.get(name.split(".")[0], {unit_of(file)})

    assert not imports_where(abroad)


def dotted(file: Path) -> str:
    return ".".join(file.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.heavy
def test_reading_a_config_or_the_trainer_loads_no_engine() -> None:
    """A config, a callback, the list of methods and the doctor's look at versions, which may find one missing, need no torch."""
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
    config = [
        "cepo.commands.doctor",
        "cepo.trainer.protocol",
        *(dotted(file) for file in MODULES if unit_of(file) == "config"),
    ]
    computing_modules = [dotted(file) for file in MODULES if unit_of(file) in PURE | {"trainer"}]
    assert "cepo.algorithms.statistics" in computing_modules
    script = textwrap.dedent(script).format(config=" ".join(config), others=" ".join(computing_modules))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    by_config, by_all = (set(line.split()) for line in done.stdout.splitlines())
    assert not by_config & {"torch", "numpy", "pyarrow", "pandas", "datasets", *HEAVY}
    assert not by_all & set(HEAVY)


ELSEWHERE = [file for file in MODULES if unit_of(file) != "algorithms"]


def test_no_module_outside_algorithms_knows_a_methods_name() -> None:
    """Tests and a study's own method may build on another."""
    names = set(available_estimators()) - set(OTHER_MEANINGS)
    word = re.compile(rf"\b({'|'.join(sorted(names))})\b")
    matches = lines_that_match(word, ELSEWHERE)
    for folder in ("scripts", "lab"):
        programs = [path for path in sorted((REPOSITORY / folder).rglob("*")) if path.suffix in (".py", ".sh")]
        programs = [path for path in programs if path.parent.name != "tests"]
        programs = [path for path in programs if "@register_estimator" not in path.read_text(encoding="utf-8")]
        assert programs, f"{folder} holds no program"
        matches += lines_that_match(word, programs)
    assert not matches, "\n".join(matches)


OTHER_MEANINGS = ("cepo", "visual")
"""Methods whose name is the package's too, or that of a part of models."""


ABOUT_METHODS = r"\w*(?:estimator|method|algorithm)\w*"
OWN_NAME = rf"""["'](?:{"|".join(OTHER_MEANINGS)})["']"""
DECISION = re.compile(
    rf"{ABOUT_METHODS}\)?(?: [=!]= | (?:not )?in |\[|\().*{OWN_NAME}"
    rf"|{OWN_NAME} (?:[=!]=|(?:not )?in) .*{ABOUT_METHODS}|\bcase .*{OWN_NAME}"
)
"""A line that compares, looks up or matches such a name as a method's."""


def test_no_module_outside_algorithms_decides_by_such_a_name() -> None:
    matches = lines_that_match(DECISION, ELSEWHERE)
    assert not matches, "\n".join(matches)


def test_the_search_for_decisions_on_a_name_sees_5_of_5() -> None:
    """It lets 3 uses of the package's name pass."""
    deciding = [
        "if config.adv_estimator == 'cepo': pass",
        "if method in ('other', 'cepo'): pass",
        "section = config.methods['cepo']",
        "build_estimator('cepo')",
        "    case 'other' | 'cepo': pass",
    ]
    passing = ["logger = getLogger('cepo')", "inside = path.parts[0] == 'cepo'", "versions = {'cepo': version}"]
    assert [source for source in deciding + passing if DECISION.search(source)] == deciding


def programs_in(*folders: str) -> list[Path]:
    files: list[Path] = []
    for folder in folders:
        files += sorted((REPOSITORY / folder).rglob("*.py"))
    return files


SIZED = programs_in("cepo", "scripts", "lab", "testing", "examples")


def test_functions_have_at_most_60_lines() -> None:
    long: list[str] = []
    for file in SIZED:
        for node in nodes_of(file):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                num_lines = node.end_lineno - node.lineno + 1
                if num_lines > 60:
                    long.append(f"{place(file, node.lineno)} {node.name} has {num_lines} lines")
    assert not long, "\n".join(long)


def test_names_of_tests_have_at_most_60_characters() -> None:
    long: list[str] = []
    for file in programs_in("tests"):
        names = re.findall(r"^ *def (test_\w{56,})", file.read_text(encoding="utf-8"), re.MULTILINE)
        long += [f"{file.relative_to(REPOSITORY)}: {name}" for name in names]
    assert not long, "\n".join(long)


OWN_MODEL = {"microgeo"}
"""The built-in toy task builds a tiny model of one family, with that family's classes."""
SPOKEN_OF = {"fused_decoding.py"}
"""Names the decoder classes whose layers it computes."""


def test_only_families_know_model_types_and_architectures() -> None:
    types = {re.escape(model_type) for family in FAMILIES for model_type in family.model_types}
    named = re.compile(
        rf"""["']({"|".join(sorted(types))})["']"""
        r"|\b(Qwen\w*VL\w*|InternVL\w*|SmolVLM\w*|Idefics3\w*|Gemma3\w*|Llava\w*)(Model|For|Config|Processor)\w*"
    )
    known = {"families.py", *OWN_MODEL, *SPOKEN_OF}
    matches = lines_that_match(named, [file for file in MODULES if not known & set(file.relative_to(PACKAGE).parts)])
    assert not matches, "\n".join(matches)


def test_families_are_registered_and_no_model_type_stands_twice() -> None:
    family_classes = {
        kind for kind in vars(families).values() if isinstance(kind, type) and issubclass(kind, families.Family)
    }
    assert {type(family) for family in FAMILIES} == family_classes
    types = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(types) == len(set(types)) >= 18


def test_nothing_in_the_package_imports_lab() -> None:
    assert not imports_where(lambda _, name: name.split(".")[0] == "lab")


def test_no_test_of_the_package_imports_lab() -> None:
    importing: list[str] = []
    for file in programs_in("tests", "testing"):
        for name, line in imports_of(file):
            if name.split(".")[0] == "lab":
                importing.append(place(file, line))
    assert not importing, "\n".join(importing)


def test_only_the_studies_import_the_studies() -> None:
    studies = REPOSITORY / "lab" / "studies"
    importing: list[str] = []
    for file in programs_in("lab", "scripts", "tests"):
        if studies in file.parents:
            continue
        for name, line in imports_of(file):
            if name.split(".")[:2] == ["lab", "studies"]:
                importing.append(place(file, line))
    assert not importing, "\n".join(importing)


def test_no_message_installs_cepo_from_an_index() -> None:
    """No index has `cepo`: its extras are installed from the checkout."""
    files = [*(REPOSITORY / "cepo").rglob("*.py"), *(REPOSITORY / "examples").rglob("*.py")]
    offending_files = [
        str(file) for file in files if re.search(r"""(install|or) ['"]cepo\[""", file.read_text(encoding="utf-8"))
    ]
    assert offending_files == []
