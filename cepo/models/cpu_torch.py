"""Lets CUDA builds of torchvision, torchaudio and torchcodec stand beside a CPU build of torch.

The wheels of these that a package index offers are linked against CUDA torch. Beside a CPU torch their C++ libraries cannot
be loaded, and then importing them dies: torchvision with `operator torchvision::nms does not exist`, because it
registers rules for operators that its library would have defined; the other two with an OSError. transformers' Qwen
processors and vLLM import them and need none of them for pictures. So the schemas of torchvision's operators are declared
(calling one still raises, as it must), and a torchaudio or torchcodec that cannot load is marked as not installed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPTIONAL = {"torchaudio": "lib/_torchaudio*.so", "torchcodec": "libtorchcodec_image*.so"}
_library: object | None = None  # torch drops the declarations when the handle is collected


def repair_this_process() -> bool:
    """Makes `import torchvision` work, and hides companions that cannot load, where torch is a CPU build.

    Returns:
        True if something had to be repaired, now or by an earlier call.
    """
    global _library
    import torch

    has_torchvision = _is_installed("torchvision")  # in a child of a repaired process this look-up does the repair
    if torch.version.cuda is not None or _library is not None:
        return _library is not None
    for package, library_files in _OPTIONAL.items():
        if _is_installed(package) and not _loads(package, library_files):
            sys.modules[package] = None  # type: ignore[assignment]  # Python's own mark for "not installed"
    if "datasets.config" in sys.modules and sys.modules.get("torchcodec", sys) is None:
        vars(sys.modules["datasets.config"])["TORCHCODEC_AVAILABLE"] = False  # it looked before, and would import it
    if has_torchvision and not _loads("torchvision", "_C*.so"):
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(operator + _SCHEMA)
        _library = library
    return _library is not None


def repair_this_process_and_its_children() -> None:
    """As `repair_this_process`, and through `sitecustomize` on PYTHONPATH for every Python process started from here.

    vLLM inspects model classes in a fresh interpreter, which would otherwise meet the same failing import.
    """
    if not repair_this_process():
        return
    site = str(Path(__file__).parent / "child_site")
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if site not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([site, *paths])


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _loads(package: str, pattern: str) -> bool:
    """Whether the package's compiled libraries can be loaded beside this torch; True where it has none."""
    import torch

    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    for library_file in Path(spec.origin).parent.glob(pattern):
        try:
            torch.ops.load_library(str(library_file))
        except OSError:
            return False
    return True
