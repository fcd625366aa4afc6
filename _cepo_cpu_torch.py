"""Lets CUDA builds of torchvision, torchaudio and torchcodec coexist with a CPU build of torch.

vLLM's CPU build requires all three, but their wheels on a package index are linked against CUDA torch. With a CPU
torch, their C++ libraries cannot be loaded and importing them fails: torchvision with `operator torchvision::nms does
not exist`, because it registers rules for operators that its library would have defined, the other two with an OSError.
transformers' processors and vLLM import all three, but do not need their libraries for images and text. Therefore the
schemas of torchvision's operators are declared (calling one still raises, as it must), and a torchaudio or torchcodec
that cannot be loaded counts as not installed, a case that transformers and vLLM handle.

Installing cepo puts this file and `_cepo_cpu_torch.pth`, which calls `watch`, into the environment's site-packages, so
it works in every process there. At start-up it only adds an entry to `sys.meta_path`. It reads no other file until a
package that leads to these imports is looked up, and torch is imported by torchvision only. If cepo is not installed,
as in a checkout on PYTHONPATH, importing cepo calls `watch`. This file imports only the standard library, and only when
needed. It imports nothing from the package, because the process may be about to use another checkout of it.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LIBRARIES = {
    "torchvision": "_C*.so",
    "torchaudio": "lib/_torchaudio*.so",
    "torchcodec": "libtorchcodec_image*.so",
}
_WATCHED = frozenset({"torch", "transformers", "datasets", "vllm", *_LIBRARIES})
_NEEDED_FOR_CUDA = b"libc10_cuda.so"
_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

_declarations: Any = None  # torch drops the declarations when the handle is collected


class _Watch:
    """A meta-path finder that finds nothing, but checks the builds before a watched package is first looked up."""

    def __init__(self, and_children: bool) -> None:
        self._and_children = and_children
        self._settled = False
        self._operators_are_missing = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in _WATCHED:
            if not self._settled:
                self._settle()
            if sys.modules.get(name, self) is None:
                raise ModuleNotFoundError(
                    f"No module named {name!r} that was built for this CPU build of torch", name=name
                )
        elif self._operators_are_missing and name.startswith("torchvision."):  # its first line has imported torch
            self._operators_are_missing = False
            _declare_operators()

    def _settle(self) -> None:
        self._settled = True
        mismatched = mismatched_builds()
        self._operators_are_missing = "torchvision" in mismatched
        for package in mismatched:
            if package != "torchvision" and package not in sys.modules:
                sys.modules[package] = None  # type: ignore[assignment]  # Python's own marker for "not installed"
        if mismatched and self._and_children:
            _reach_children()


def watch(*, and_children: bool = False) -> None:
    """Starts watching this process's imports; later calls have no effect.

    Args:
        and_children: if builds do not match, also watch every Python process started from here, through a
            `sitecustomize` on PYTHONPATH. This is for environments without cepo installed, whose interpreters do not
            watch by themselves.
    """
    if not any(type(finder).__qualname__ == _Watch.__qualname__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch(and_children))


def mismatched_builds() -> tuple[str, ...]:
    """Returns which of the three packages were built for CUDA although torch is a CPU build; imports none of them."""
    import re
    from importlib.machinery import PathFinder
    from pathlib import Path

    torch = PathFinder.find_spec("torch")
    if torch is None or torch.origin is None:
        return ()
    version = Path(torch.origin).with_name("version.py")
    if not version.is_file() or not re.search(
        r"^cuda\b[^=]*=\s*None", version.read_text(encoding="utf-8"), re.MULTILINE
    ):
        return ()
    return tuple(package for package, pattern in _LIBRARIES.items() if _is_built_for_cuda(package, pattern))


def _is_built_for_cuda(package: str, pattern: str) -> bool:
    from importlib.machinery import PathFinder
    from pathlib import Path

    spec = PathFinder.find_spec(package)
    if spec is None or spec.origin is None:
        return False
    return any(_NEEDED_FOR_CUDA in library.read_bytes() for library in Path(spec.origin).parent.glob(pattern))


def _declare_operators() -> None:
    global _declarations
    import torch

    declarations = torch.library.Library("torchvision", "DEF")
    for operator in _OPERATORS:
        declarations.define(operator + _SCHEMA)
    _declarations = declarations


def _reach_children() -> None:
    import os
    from pathlib import Path

    folder = str(Path(__file__).parent / "cepo" / "child_site")
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if folder not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *paths])
