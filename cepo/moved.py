"""Lets scripts of version 0.4 import modules by their old names, with a warning. It goes with version 0.6."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED: Mapping[str, str] = {
    "algorithms.credit": "algorithms.statistics",
    "algorithms.readings": "algorithms.teacher_contexts",
    "algorithms.token_batches": "algorithms.masking",
    "cli": "commands.cli",
    "config.named_files": "config.path_checks",
    "config.own_records": "run_folder.own_records",
    "config.recorded": "config.untrusted_record",
    "credit.session": "credit.resources",
    "data.answers_text": "data.answer_column",
    "data.cells": "data.row_parser",
    "data.contexts": "data.prompts",
    "data.data_uri": "report.shown_responses",
    "data.formats": "data.tables",
    "data.measures": "data.row_check",
    "data.remembering": "data.fingerprint",
    "data.rules": "data.row_settings",
    "doctor": "commands",
    "doctor.launched": "runtime.preflight",
    "doctor.machine": "commands.machine",
    "doctor.preflight": "runtime.preflight",
    "doctor.printing": "commands.doctor",
    "credit.tables": "credit.credit_page",
    "evaluation.lmms_export": "evaluation.lmms",
    "evaluation.measuring": "evaluation.evaluate",
    "evaluation.named_sources": "evaluation.benchmark_names",
    "evaluation.published": "evaluation.comparison",
    "evaluation.run": "evaluation.tasks",
    "files.foreign": "files.safe_files",
    "files.own_folders": "files.temp_folders",
    "integrations.gathered": "integrations.adapter",
    "losses.gspo_token": "losses.gspo",
    "models.capped_head": "models.head",
    "models.fused_decoding": "models.cpu.fused_decoding",
    "models.inputs": "models.interface",
    "models.matrix_products": "models.cpu.matrix_products",
    "report.clip_table": "report.clip_rates",
    "report.model_card": "report.publishing",
    "report.recorded_teachers": "report.replayable_methods",
    "report.same_settings": "report.run_group",
    "report.setting": "report.run_group",
    "report.verdict": "report.comparison_sentence",
    "rewards.algebra": "answers.algebra",
    "rewards.choices": "answers.choices",
    "rewards.comparison": "answers.comparison",
    "rewards.digits": "answers.digits",
    "rewards.functions": "rewards.contract",
    "rewards.moments": "answers.datetimes",
    "rewards.numbers": "answers.numbers",
    "rewards.reals": "answers.exact_numbers",
    "rewards.serving": "rewards.worker_process",
    "rewards.spelling": "answers.spelling",
    "rewards.statements": "answers.statements",
    "rewards.structures": "answers.structures",
    "rewards.tokens": "answers.lexer",
    "rewards.typesetting": "answers.typesetting",
    "rewards.unit_table": "answers.unit_table",
    "rewards.units": "answers.units",
    "run_folder.contrast": "report.response_pair",
    "run_folder.earlier_runs": "run_folder.layout",
    "run_folder.fragment": "report.html_snippet",
    "run_folder.tokens": "report.shown_responses",
    "runtime.arrivals": "runtime.result_queue",
    "runtime.reach": "runtime.network",
    "sections.declaring": "sections.fields",
    "sections.wording": "sections.messages",
    "terminal.words": "config.arguments",
    "tracking": "run_folder.sinks",
    "tracking.console": "run_folder.sinks.console",
    "tracking.external": "run_folder.sinks.external",
    "tracking.files": "run_folder.sinks.files",
    "tracking.mlflow_sink": "run_folder.sinks.mlflow_sink",
    "tracking.samples": "run_folder.sinks.samples",
    "tracking.sink": "run_folder.sinks.base",
    "tracking.swanlab_sink": "run_folder.sinks.external",
    "tracking.tensorboard_sink": "run_folder.sinks.tensorboard_sink",
    "tracking.tracker": "run_folder.sinks.tracker",
    "tracking.trackio_sink": "run_folder.sinks.external",
    "tracking.wandb_sink": "run_folder.sinks.external",
    "trainer.asking": "trainer.sampling",
    "trainer.groups": "trainer.rollout_groups",
    "workers.kept_states": "workers.hidden_state_cache",
    "workers.passes": "workers.batching",
    "workers.trained": "workers.training",
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
