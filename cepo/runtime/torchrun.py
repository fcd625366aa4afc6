"""Refuses a run that another program starts once per device: cepo starts its own workers."""

from __future__ import annotations

import os
from collections.abc import Mapping

from cepo.errors import ConfigError

_COUNTS = {
    "WORLD_SIZE": "torchrun, accelerate or deepspeed",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun or srun",
    "SLURM_STEP_NUM_TASKS": "srun",
}
"""The variables in which launchers write how many processes they have started."""
_OWN_NUMBERS = {
    "WORLD_SIZE": "RANK",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}
_COUNTS_PER_MACHINE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


def require_one_process(environment: Mapping[str, str] = os.environ) -> None:
    """Raises `ConfigError` if a launcher has started several processes, which would all train in the same run folder."""
    for variable, launcher in _COUNTS.items():
        own_number = _OWN_NUMBERS[variable]
        num_processes = _count(environment, variable)
        if num_processes < 2 or own_number not in environment:
            continue
        per_machine = num_processes
        for name in _COUNTS_PER_MACHINE:
            per_machine = _count(environment, name) or per_machine
        devices = f"trainer.n_gpus_per_node={per_machine}"
        machines = num_processes // per_machine
        if machines > 1:
            devices = f"trainer.nnodes={machines} {devices} trainer.ray_address=auto, in a Ray cluster of the machines"
        raise ConfigError(
            f"{launcher} has started this as process {environment[own_number]} of {num_processes} ({variable}), and each of "
            "them would train a model of its own in the same run folder. cepo starts one worker per device itself: run "
            f"`cepo train config=FILE {devices}` without the launcher"
        )


def _count(environment: Mapping[str, str], variable: str) -> int:
    text = environment.get(variable, "")
    return int(text) if text.isdecimal() else 0
