"""Lets scripts of version 0.4 import modules by their old names, with a warning. It goes with version 0.6."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED: Mapping[str, str] = {
    "algorithms.credit": "algorithms.statistics",
    "cli": "commands.cli",
    "config.recorded": "config.untrusted_record",
    "credit.session": "credit.resources",
    "data.contexts": "data.prompts",
    "data.rules": "data.row_settings",
    "doctor": "commands",
    "doctor.machine": "commands.machine",
    "credit.tables": "credit.credit_page",
    "evaluation.published": "evaluation.comparison",
    "evaluation.run": "evaluation.tasks",
    "integrations.gathered": "integrations.adapter",
    "models.fused_decoding": "models.cpu.fused_decoding",
    "models.inputs": "models.interface",
    "rewards.answers": "rewards",
    "rewards.functions": "rewards.contract",
    "rewards.serving": "rewards.worker_process",
    "runtime.reach": "runtime.network",
    "tracking": "run_folder.sinks",
    "tracking.console": "run_folder.sinks.console",
    "tracking.external": "run_folder.sinks.external",
    "tracking.sink": "run_folder.sinks.base",
    "tracking.tracker": "run_folder.sinks.tracker",
    "trainer.asking": "trainer.sampling",
    "workers.kept_states": "workers.hidden_state_cache",
    "workers.passes": "workers.batching",
}
"""The new name of each module by its old one, both below the package."""


class _MovedModuleLoader:
    """Loads a module under its old name, which is the module with the new name."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new_name = f"cepo.{MOVED[spec.name.removeprefix('cepo.')]}"
        warnings.warn(f"{spec.name} is now {new_name}", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new_name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Gives the module, which was executed under its new name, its own specification again."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def find_moved_module(fullname: str) -> ModuleSpec | None:
    """The specification of the module that had the name in version 0.4; None for other names."""
    is_old_name = fullname.removeprefix("cepo.") in MOVED
    return ModuleSpec(fullname, _MovedModuleLoader()) if is_old_name else None  # type: ignore[arg-type]
