"""Checks what a run needs before it loads a model: trackers, reward function, run folder, checkpoint, Ray."""

from __future__ import annotations

import os
from collections.abc import Callable

from cepo.config import RunConfig, chosen_launcher, run_folder
from cepo.doctor.findings import Finding
from cepo.doctor.machine import SHARED_MEMORY, Machine
from cepo.errors import CepoError
from cepo.rewards.combined import load_reward
from cepo.rewards.functions import load_answer_function
from cepo.runtime.reach import why_no_answer
from cepo.sizing.phases import gib
from cepo.tracking.sink import check_sinks
from cepo.trainer.resuming import checkpoint_store, checkpoint_to_load

START, RAY = "start", "several devices"
_SHARED_PER_DEVICE = 2 * 2**30
"""Shared memory per device, for the data that its processes exchange, including images."""


def start_findings(config: RunConfig) -> list[Finding]:
    """Checks trackers, reward function, run folder and checkpoint as the run itself does, without writing anything."""
    return [
        _tried("trackers", lambda: _trackers(config), "install what is missing, or take it out of trainer.logger"),
        _tried("reward", lambda: _reward(config), "correct the file, or worker.reward.reward_function"),
        _folder(config),
        _tried(
            "checkpoint",
            lambda: _checkpoint(config),
            "trainer.find_last_checkpoint=false or another trainer.experiment_name starts a new run",
        ),
    ]


def ray_findings(config: RunConfig, machine: Machine) -> list[Finding]:
    """Checks the cluster, and whether processors and shared memory suffice for a run under Ray; nothing without Ray."""
    if chosen_launcher(config) != "ray":
        return []
    devices = config.trainer.n_gpus_per_node
    wanted = devices + 1 + config.worker.reward.num_cpus
    found = f"{machine.processors} processors for {devices} devices, the driver and {config.worker.reward.num_cpus} for rewards"
    enough = machine.processors >= wanted
    remedy = "" if enough else f"give the container {wanted} processors; with fewer, processes wait for one another"
    processors = Finding(RAY, "processors", "ok" if enough else "warn", found, remedy=remedy)
    findings = [_cluster(config), processors]
    if machine.shared_free is None:
        return findings
    needed = devices * _SHARED_PER_DEVICE
    found = f"{gib(machine.shared_free)} free in {SHARED_MEMORY}, {gib(needed)} for {devices} devices"
    enough = machine.shared_free >= needed
    remedy = "" if enough else "in a container: --shm-size=16g or --ipc=host; Ray falls back to the disk, NCCL may fail"
    shared = Finding(RAY, "shared memory", "ok" if enough else "warn", found, remedy=remedy)
    return [*findings, shared]


def _cluster(config: RunConfig) -> Finding:
    """Checks that a cluster answers if one is named or needed; the run itself checks its resources."""
    address = config.trainer.ray_address or os.environ.get("RAY_ADDRESS")
    host, _, port = (address or "").rpartition(":")
    subject, remedy = (
        "cluster",
        "start one with `ray start --head`, and give the address it prints as trainer.ray_address",
    )
    if address is None and config.trainer.nnodes > 1:
        found = f"none is named for {config.trainer.nnodes} machines: no trainer.ray_address, no RAY_ADDRESS"
        return Finding(RAY, subject, "fail", found, remedy=remedy)
    if address is None:
        return Finding(RAY, subject, "ok", "started on this machine for the run")
    if not (host and port.isdecimal()) or "/" in host:
        return Finding(RAY, subject, "info", f"joined at {address}, not tried here")
    why = why_no_answer(address)
    if why is not None:
        found = f"nothing answers at {address}: {why}"
        return Finding(RAY, subject, "fail", found, remedy=remedy)
    return Finding(RAY, subject, "ok", f"answers at {address}")


def _tried(subject: str, look: Callable[[], str], remedy: str) -> Finding:
    try:
        return Finding(START, subject, "ok", look())
    except CepoError as error:
        return Finding(START, subject, "fail", str(error), remedy=remedy)


def _trackers(config: RunConfig) -> str:
    check_sinks(config.trainer.logger)
    return ", ".join(config.trainer.logger)


def _reward(config: RunConfig) -> str:
    reward = config.worker.reward
    load_reward(reward.reward_function, reward.reward_function_kwargs, reward.reward_weights)
    if reward.answer_function is not None:
        load_answer_function(reward.answer_function)
    return reward.reward_function


def _folder(config: RunConfig) -> Finding:
    folder = run_folder(config)
    existing = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return Finding(START, "run folder", "ok", str(folder))
    reason = "permission denied" if existing.is_dir() else f"{existing} is a file"
    remedy = "set trainer.save_checkpoint_path to another"
    found = f"{folder} cannot be written: {reason}"
    return Finding(START, "run folder", "fail", found, remedy=remedy)


def _checkpoint(config: RunConfig) -> str:
    store = checkpoint_store(config)
    checkpoint = checkpoint_to_load(config, store)
    if checkpoint is None:
        return "none: the run starts at step 1"
    return f"{checkpoint}: the run continues with step {store.read(checkpoint).step + 1}"
