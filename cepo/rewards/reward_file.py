"""The Python file of a reward or answer function: where it is, and how it is run with what lies beside it.

Reward workers import this module before their path is set.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

import cepo
from cepo.errors import RewardError, place_in

_PACKAGE_ROOT = Path(cepo.__file__).resolve().parent


def resolve_reward_path(spec: str) -> tuple[Path, str]:
    """Returns the existing file and the function name (default `main`) in `spec`; runs nothing.

    A relative path is looked up in the working directory, then, if it starts with `cepo/`, in the installed package, so
    `cepo/rewards/math.py:compute_score` works from any folder. Raises `RewardError` if the file does not exist.
    """
    spec = spec.strip()
    file, separator, function_name = spec.rpartition(":")
    has_function_name = separator and "/" not in function_name and not function_name.endswith(".py")
    if not has_function_name:
        file = spec
        function_name = "main"
    if not file or not function_name:
        raise RewardError(f"reward function {spec!r}: give path/to/file.py:function.")
    path = Path(file).expanduser()
    if path.is_file():
        return path.resolve(), function_name
    if not path.is_absolute() and path.parts[0] == "cepo":
        packaged = _PACKAGE_ROOT.parent / path
        if packaged.is_file():
            return packaged, function_name
    raise RewardError(
        f"reward function {spec!r}: there is no file {str(path)!r} (working directory {Path.cwd()}). "
        "Give path/to/file.py:function; the built-in one is cepo/rewards/math.py:compute_score."
    )


class _Neighbours:
    """Finds the modules and packages beside a reward file, before others of their names.

    That is Python's rule for a script, but for names of the standard library, which a reward file such as `math.py` has, and
    for the file's own name. Of a file in a package, it finds the package too.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.package = _package_of(file.parent)
        num_folders_to_root = self.package.count(".")
        self._package_root = file.parents[num_folders_to_root]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns where a module beside the file is; None for others. Python calls it for each import."""
        is_in_package = path is not None  # whose own path has it
        if is_in_package or name in sys.stdlib_module_names:
            return None
        is_own_package = name == self.package.partition(".")[0]
        folder = self._package_root.parent if is_own_package else self._file.parent
        spec = PathFinder.find_spec(name, [str(folder)])
        if spec is None or spec.loader is None or spec.origin == str(self._file):
            return None
        return spec


_files: set[Path] = set()
"""The reward files that this process has run."""


def run_reward_file(file: Path) -> ModuleType:
    """Runs a file and returns its module; from then on this process imports what lies beside it.

    A file of cepo imports nothing beside it. Raises `RewardError` if the file fails, or if a module beside it has the name of
    one that another reward's file in another folder has imported.
    """
    # A name per file: two reward files with the same stem must not replace each other.
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    name = f"cepo_reward_{file.stem}_{digest}"
    if not file.is_relative_to(_PACKAGE_ROOT):
        neighbours = _Neighbours(file)
        if neighbours.package:
            name = f"{neighbours.package}.{name}"
        _require_own_modules(file.parent)
        if file not in _files:
            _files.add(file)
            sys.meta_path.insert(0, neighbours)
            # Last: a folder without __init__.py is a package if nothing else has its name.
            sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise RewardError(f"{file} is not a Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look up a class's module by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        place = place_in(error, [file]) or file
        remedy = ""
        if isinstance(error, ModuleNotFoundError):
            remedy = f". Modules are found beside {file}, in PYTHONPATH and among the libraries of {sys.executable}"
        elif isinstance(error, SystemExit):
            remedy = ". It ends the program; put what only a script needs under if __name__ == '__main__':"
        raise RewardError(f"{place} fails when it is loaded: {type(error).__name__}: {error}{remedy}") from error
    return module


def _require_own_modules(folder: Path) -> None:
    """Raises `RewardError` if a module in a folder has the name of one that was imported from another reward's folder."""
    other_folders = {file.parent for file in _files} - {folder}
    for place in folder.glob("*.py"):
        origin = getattr(sys.modules.get(place.stem), "__file__", None)
        if origin is not None and Path(origin).parent in other_folders:
            raise RewardError(f"{place} and {origin} are modules of one name, which reward files import: rename one.")


def _package_of(folder: Path) -> str:
    """Returns the dotted name of the package that a folder is; empty if it is none."""
    names: list[str] = []
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        names.insert(0, folder.name)
        folder = folder.parent
    return ".".join(names)
