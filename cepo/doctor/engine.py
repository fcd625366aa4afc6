"""What vLLM would be started with on this machine: its attention, options and environment, as a run's own start has them."""

from __future__ import annotations

import json
import os

from cepo.config import RunConfig
from cepo.config.derived import num_devices
from cepo.doctor.attention import attention_for
from cepo.doctor.findings import Finding
from cepo.doctor.machine import Machine
from cepo.errors import EngineError
from cepo.rollout.engine_options import EngineMachine, attention_backend, engine_environment, engine_options
from cepo.rollout.factory import engine_settings_of_run

SECTION = "this config's engine"


def engine_findings(config: RunConfig, machine: Machine, *, sleeps: bool) -> list[Finding]:
    """Nothing without a GPU."""
    if not machine.gpus or machine.tools is None:
        return []
    settings = engine_settings_of_run(config, most_visuals=(1, 0), sleeps=sleeps)
    start = EngineMachine(
        capability=machine.gpus[0].capability,
        serves_flashinfer=machine.tools.serves_flashinfer,
        num_ranks=num_devices(config),
    )
    try:
        options = engine_options(settings, start)
    except EngineError as error:
        remedy = "change the setting that the message names, or set worker.rollout.name=transformers"
        return [Finding(section=SECTION, subject="options", mark="fail", found=str(error), remedy=remedy)]
    environment = {
        name: os.environ.get(name, value) for name, value in sorted(engine_environment(settings, start).items())
    }
    found = {
        "attention": _attention(start),
        "options": json.dumps(options, sort_keys=True),
        "environment": " ".join(f"{name}={value}" for name, value in environment.items()),
    }
    return [Finding(section=SECTION, subject=subject, mark="info", found=text) for subject, text in found.items()]


def _attention(start: EngineMachine) -> str:
    assert start.capability is not None
    support = attention_for(start.capability)
    if support is None:
        return "vLLM's own choice; the card is not in the table of architectures"
    asked = attention_backend(start)
    if asked is None:
        return f"{support.vllm[0]}, vLLM's own choice"
    name = next(backend for backend in support.vllm if backend.startswith(asked))
    return f"{name}, asked for: {support.vllm[0]}, vLLM's own choice, has no compiled kernels here and nothing to compile them"
