"""Which family the model belongs to, how its rows are computed, and which engine samples from it."""

from __future__ import annotations

import logging
from typing import Any

from cepo.config import RunConfig, served_adapter_rank
from cepo.doctor.findings import DEVICES, Finding
from cepo.doctor.machine import Machine
from cepo.errors import ConfigError
from cepo.models.families import EngineUse, Family, family_of
from cepo.rollout.factory import choose_generator


def family_of_run(config: RunConfig) -> Family:
    """The family of the run's model, from its configuration file alone.

    Raises:
        ConfigError: no configuration can be read, or the architecture is not supported.
    """
    import transformers

    model = config.worker.actor.model
    try:
        found: Any = transformers.AutoConfig.from_pretrained(
            model.model_path, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ConfigError(f"worker.actor.model.model_path '{model.model_path}' cannot be read: {first_line}") from error
    return family_of(found, trust_remote_code=model.trust_remote_code)


def family_finding(config: RunConfig) -> Finding:
    """Whether the architecture is supported, and on which path."""
    try:
        family = family_of_run(config)
    except ConfigError as error:
        remedy = "name a checkpoint of a supported family, in a folder or on a hub that can be reached"
        return Finding(section=DEVICES, subject="model", mark="fail", found=str(error), remedy=remedy)
    path = "rows that share tokens are packed" if family.packs else f"rows are padded: {family.why_padded}"
    return Finding(section=DEVICES, subject="model", mark="ok", found=f"{family.title}; {path}")


def generator_finding(config: RunConfig, machine: Machine) -> Finding:
    """Which generator a run would take; fails where it asks for one that cannot run here."""
    generators_log = logging.getLogger("cepo.rollout.factory")
    before = generators_log.level
    generators_log.setLevel(logging.ERROR)  # its choice is reported here, as a finding
    try:
        name = choose_generator(
            config.worker.rollout.name,
            device="cuda" if machine.gpus else "cpu",
            unserved=_unserved(config, on_gpu=bool(machine.gpus)),
        )
    except ConfigError as error:
        remedy = "set worker.rollout.name=auto, or install the package with the extra 'gpu' or 'cpu'"
        return Finding(section=DEVICES, subject="generator", mark="fail", found=str(error), remedy=remedy)
    finally:
        generators_log.setLevel(before)
    return Finding(section=DEVICES, subject="generator", mark="ok", found=name)


def _unserved(config: RunConfig, *, on_gpu: bool) -> str | None:
    """Why vLLM cannot serve the model; None where it can, or where the model is not known, which another finding says."""
    try:
        family = family_of_run(config)
    except ConfigError:
        return None
    use = EngineUse(
        on_gpu=on_gpu,
        dtype=config.worker.rollout.dtype,
        with_adapter=served_adapter_rank(config.worker.actor.model.lora) > 0,
        most_images=config.worker.rollout.limit_images or int(family.reads_images),
    )
    return family.why_not_vllm(use)
