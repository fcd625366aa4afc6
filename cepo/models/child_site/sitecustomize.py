"""Runs at the start of child interpreters (see `cepo.models.cpu_torch`).

Importing torch at every interpreter start would cost seconds in processes that never need it, so the repair waits
until one of the packages that lead to the failing imports is first looked for.
"""

import importlib.util
import sys
from pathlib import Path


class _BeforeFirstUse:
    """A meta-path finder that finds nothing itself: it only repairs, once, before the first look for such a package."""

    def find_spec(self, name, path=None, target=None):
        if name in ("torchvision", "torchaudio", "torchcodec", "transformers", "vllm") and self in sys.meta_path:
            sys.meta_path.remove(self)
            module = sys.modules.get("cepo.models.cpu_torch") or self._load()
            module.repair_this_process()
            if sys.modules.get(name, self) is None:
                raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        return None

    def _load(self):
        """The repair under its own name, so that a later import of it finds what it has done already."""
        file = Path(__file__).parent.parent / "cpu_torch.py"
        spec = importlib.util.spec_from_file_location("cepo.models.cpu_torch", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module


sys.meta_path.insert(0, _BeforeFirstUse())
