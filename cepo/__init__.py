"""Trains vision-language models with Contrastive Evidence Policy Optimization (CEPO) and other methods.

The names of `cepo.api` are imported when they are first used, so `import cepo` costs milliseconds. `cepo/__init__.pyi` has
their types.
"""

import sys

__version__ = "0.5.0"


class _MovedModules:
    """Asks `cepo.moved` for modules under the names that they had in version 0.4."""

    @staticmethod
    def find_spec(fullname, path=None, target=None):
        if not fullname.startswith("cepo.") or fullname == "cepo.moved":
            return None
        from cepo.moved import find_moved_module

        return find_moved_module(fullname)


sys.meta_path.insert(0, _MovedModules)

_HOMES = {
    "Callback": "cepo.trainer.callbacks",
    "Evaluation": "cepo.api",
    "Run": "cepo.report.page",
    "RunConfig": "cepo.config",
    "evaluate": "cepo.api",
    "load_config": "cepo.api",
    "merge": "cepo.api",
    "open_run": "cepo.report.page",
    "push": "cepo.api",
    "train": None,
}
__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module 'cepo' has no attribute {name!r}. Known: {', '.join(_HOMES)}")
    from importlib import import_module

    home = _HOMES[name]
    # The module cepo.train is callable: importing it anywhere sets this name to the module.
    return import_module("cepo.train") if home is None else getattr(import_module(home), name)


def __dir__():
    return sorted({*globals(), *__all__})
