"""Lets a CUDA build of torchvision live beside a CPU build of torch: run by scripts/common.sh in environments that it makes.

Where only a CPU build of torch is at hand, as a wheel on a disk, the torchvision of the public index is built for CUDA. Its
C++ library cannot be loaded then, and importing it ends with `operator torchvision::nms does not exist`, because it
registers a rule for an operator that the library would have defined. transformers' processors need no such operator. So
the operator's schema is declared at the head of that module (calling it still raises, as it must). torchaudio and
torchcodec, which vLLM's CPU build asks for and which nothing here uses, count as not installed once they are removed.
Matching builds are left as they are.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

_MARK = (
    "# Declared by scripts/mixed_builds.py of cepo: the library of this CUDA build does not load beside a CPU torch."
)
_DECLARATION = f"""{_MARK}
import torch as _torch
_declared = _torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _declared.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

"""


def fails(*packages: str) -> bool:
    """Returns whether importing the packages fails in a process of its own."""
    done = subprocess.run([sys.executable, "-c", f"import {', '.join(packages)}"], capture_output=True, check=False)
    return done.returncode != 0


def declare_operators() -> bool:
    """Declares torchvision's operators where its own library does not load; returns whether it was needed."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or not fails("torch", "torchvision"):
        return False
    file = Path(spec.origin).with_name("_meta_registrations.py")
    text = file.read_text(encoding="utf-8")
    if _MARK not in text:
        file.write_text(_DECLARATION + text, encoding="utf-8")
        for cached in file.parent.glob("__pycache__/_meta_registrations.*.pyc"):
            cached.unlink()
    return True


def main() -> int:
    """Mends the environment of this Python if its builds do not match; returns 0, or 1 if torchvision still fails."""
    mended = ["torchvision, which imports without its operators"] if declare_operators() else []
    # pip brings these back with each installation, also where torchvision was mended before.
    beside = [name for name in ("torchaudio", "torchcodec") if importlib.util.find_spec(name) and fails("torch", name)]
    if beside:
        subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *beside], check=True)
        mended += [f"{name}, which was removed" for name in beside]
    if not mended:
        return 0
    print(f"Built for CUDA beside a CPU build of torch: {'; '.join(mended)}.")
    return int(importlib.util.find_spec("torchvision") is not None and fails("torch", "torchvision"))


if __name__ == "__main__":
    sys.exit(main())
