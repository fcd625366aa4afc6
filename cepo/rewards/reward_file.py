"""The Python file of a reward or answer function: where it is, what lies beside it, and what it lacks when it fails to load.

Reward workers import this module before their path is set.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import cepo
from cepo.errors import RewardError, nearest_name, place_in

_PACKAGE_ROOT = Path(cepo.__file__).resolve().parent
_PACKAGES = {
    "Levenshtein": "levenshtein", "bs4": "beautifulsoup4", "cv2": "opencv-python-headless",
    "latex2sympy2": "latex2sympy2-extended", "skimage": "scikit-image", "sklearn": "scikit-learn",
}  # fmt: skip
"""Package names of libraries that are imported under another name."""
_SUFFIXES_OF_MODULES = (".py", ".pyi", ".pyx", ".ipynb")
"""The files that have a module's name; of the last three Python imports none."""
_MOST_LOOKED_AT = 2_000
"""The most files around a reward file among which a missing module is looked for."""


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


class Neighbours:
    """The modules and packages beside a reward file; within the context they are imported before others of their names.

    That is Python's rule for a script, but for names of the standard library, which a reward file such as `math.py` has, and
    for the file's own name. A file in a package also imports the package. A file of cepo imports nothing beside it.
    """

    _modules: ClassVar[dict[tuple[Path, str], ModuleType]] = {}
    """What was imported, by folder and name: two folders may have modules of one name."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._folder = file.parent
        self._is_own = file.is_relative_to(_PACKAGE_ROOT)
        self.package = "" if self._is_own else _package_of(self._folder)
        num_folders_to_root = self.package.count(".")
        self._root = file.parents[num_folders_to_root]  # the package's, or the file's own folder
        self._imported: set[str] = set()

    def __enter__(self) -> None:
        modules = list(self._modules.items())
        for (folder, name), module in modules:
            if folder != self._root and sys.modules.get(name) is module:
                del sys.modules[name]
        for (folder, name), module in modules:
            if folder == self._root:
                sys.modules[name] = module
        sys.meta_path.insert(0, self)

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)
        for name in self._imported:
            if name in sys.modules and self._lies_beside(name.partition(".")[0]):
                self._modules[self._root, name] = sys.modules[name]
        self._imported.clear()

    def _lies_beside(self, top: str) -> bool:
        """Returns whether an imported module that is in no package, or a package, is the one beside the file."""
        module = sys.modules.get(top)
        folder = self._folder_of(top)
        file = getattr(module, "__file__", None)
        if file is None:  # a folder without __init__.py
            return str(folder / top) in getattr(module, "__path__", ())
        return Path(file).parent in (folder, folder / top)

    def _folder_of(self, top: str) -> Path:
        """Returns where a module that is in no package is looked for: beside the file, and its own package above it."""
        is_own_package = top == self.package.partition(".")[0]
        return self._root.parent if is_own_package else self._folder

    def run(self) -> ModuleType:
        """Runs the file and returns its module; raises `RewardError` if it fails."""
        # A name per file: two reward files with the same stem must not replace each other.
        digest = hashlib.sha256(str(self._file).encode()).hexdigest()[:8]
        name = f"cepo_reward_{self._file.stem}_{digest}"
        if self.package:
            name = f"{self.package}.{name}"
        spec = importlib.util.spec_from_file_location(name, self._file)
        if spec is None or spec.loader is None:
            raise RewardError(f"{self._file} is not a Python file: its name must end in .py.")
        module = importlib.util.module_from_spec(spec)
        # Dataclasses and pickle look up a class's module by name.
        sys.modules[name] = module
        # Last: a folder without __init__.py is a package if nothing else has its name.
        if not self._is_own and str(self._folder) not in sys.path:
            sys.path.append(str(self._folder))
        try:
            with self:
                spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            place = place_in(error, [self._file]) or self._file
            remedy = ""
            if isinstance(error, ModuleNotFoundError) and error.name:
                remedy = f". {_remedy_for_missing(error.name, self._file)}"
            elif isinstance(error, SystemExit):
                remedy = ". It ends the program; put what only a script needs under if __name__ == '__main__':"
            raise RewardError(f"{place} fails when it is loaded: {type(error).__name__}: {error}{remedy}") from error
        return module

    def within(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function, which imports what lies beside the file also when it is called."""

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            with self:
                return function(*arguments, **keywords)

        return call

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns where a module beside the file is; None for others. Python calls it for each import."""
        if self._is_own or name in sys.stdlib_module_names:
            return None
        self._imported.add(name)
        if path is not None:  # in a package, whose own path has it
            return None
        spec = PathFinder.find_spec(name, [str(self._folder_of(name))])
        if spec is None or spec.loader is None or spec.origin == str(self._file):
            return None
        return spec


def _package_of(folder: Path) -> str:
    """Returns the dotted name of the package that a folder is; empty if it is none."""
    names: list[str] = []
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        names.insert(0, folder.name)
        folder = folder.parent
    return ".".join(names)


def _remedy_for_missing(module: str, file: Path) -> str:
    """Returns what to do where a reward file, or what it imports, needs a module that Python does not find.

    Nobody is advised to install what lies near the file: a stranger could have published something of that name.
    """
    library = module.partition(".")[0]
    nearby = _modules_near(file)
    if library in nearby:
        place = nearby[library]
        if place.parent == file.parent:
            return f"{place} lies beside the file, and has no module {module!r}."
        return f"It lies in {place.parent}: put it beside {file}, or name its folder in PYTHONPATH."
    beside = [name for name, place in nearby.items() if place.parent == file.parent]
    similar = nearest_name(library, beside, cutoff=0.8)
    if similar is not None:
        return f"Did you mean {similar!r}, which lies beside the file?"
    remedy = f"Install it: {sys.executable} -m pip install {_PACKAGES.get(library, library)}."
    if library == "mathruler":
        remedy += (
            " Without it, use our EasyR1 rewards (examples/reward_function/math.py:compute_score and r1v.py) or "
            "the built-in cepo/rewards/math.py:compute_score."
        )
    return remedy


def _modules_near(file: Path) -> dict[str, Path]:
    """Returns modules and packages around a reward file by name: beside it, above, below, in the folders
    beside its own, and in the working directory.
    """
    above = file.parent.parent
    places = [*file.parent.glob("*"), *above.glob("*"), *Path.cwd().glob("*")]
    places += itertools.islice(file.parent.rglob("*.py"), _MOST_LOOKED_AT)
    places += itertools.islice(above.glob("*/*"), _MOST_LOOKED_AT)
    nearby: dict[str, Path] = {}
    for place in places:
        is_module = place.suffix in _SUFFIXES_OF_MODULES and place != file
        is_package = place.is_dir() and any(place.glob("*.py"))
        if is_module or is_package:
            nearby.setdefault(place.stem, place)
    return nearby
