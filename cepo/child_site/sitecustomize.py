"""Runs at the start of child interpreters of an environment that cepo was not installed into (see `_cepo_cpu_torch.py`)."""

import importlib.util
import sys
from pathlib import Path

if "_cepo_cpu_torch" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("_cepo_cpu_torch", Path(__file__).parents[2] / "_cepo_cpu_torch.py")
    assert _spec is not None and _spec.loader is not None
    _module = importlib.util.module_from_spec(_spec)
    sys.modules[_spec.name] = _module
    _spec.loader.exec_module(_module)
    _module.watch()
