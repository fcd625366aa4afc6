"""Joins or starts the Ray cluster of a run and reserves its devices."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from cepo.config.schema import TrainerConfig
from cepo.errors import ConfigError, EngineError
from cepo.files.secrets import is_secret
from cepo.files.temp_folders import OwnFolder
from cepo.runtime.network import prepare_own_cluster
from cepo.terminal.progress import phase

logger = logging.getLogger(__name__)

_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
_CPUS_PER_WORKER = 0.01
"""Ray reserves only GPUs in whole; workers share the processors of a machine, however few it has."""
_PASSED_ON = (
    "HF_", "VLLM_", "NCCL_", "GLOO_", "TORCH_", "TRANSFORMERS_", "TOKENIZERS_", "OMP_", "XDG_CACHE_HOME", "PYTHONPATH",
    "PYTHONHASHSEED",
)  # fmt: skip


def connect(trainer: TrainerConfig) -> None:
    """Joins the cluster at `trainer.ray_address` or RAY_ADDRESS, or starts one here; an existing connection is kept.

    Raises:
        ConfigError: no cluster answers at the address, or `prepare_own_cluster` was not called before Ray was imported.
        EngineError: Ray does not start here.
    """
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # By default the head keeps records of 4 kB of the last 100,000 calls. We read none of them.
    os.environ.setdefault("RAY_task_events_max_num_task_in_gcs", "1000")
    address = trainer.ray_address or os.environ.get("RAY_ADDRESS")
    handler = signal.getsignal(signal.SIGTERM)  # the run's own, which says how to resume; Ray installs another one
    try:
        if address:
            _join(address)
        else:
            _start()
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _start() -> None:
    """Starts a cluster on this machine, which ends with this process.

    Other users of the machine can reach its loopback ports, but cannot run anything, since only this user can read the
    token (`prepare_own_cluster`) and enter the folder (mode 0700) of Ray's own folder.
    """
    prepare_own_cluster()
    files = OwnFolder("ray")
    atexit.register(files.remove)
    atexit.register(ray.shutdown)  # which runs before
    logger.info("starting Ray on this machine")
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=os.cpu_count(),
            _temp_dir=str(files.path / "r"),  # Ray opens it to all users; a short name, for its sockets
            **_QUIET,
        )
    except Exception as error:
        raise EngineError(f"Ray cannot be started on this machine: {type(error).__name__}: {error}") from error
    logger.info("started Ray on this machine, its files in %s", files.path)


def _join(address: str) -> None:
    logger.info("joining the Ray cluster at %s", address)
    try:
        ray.init(address=address, **_QUIET)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        mode = os.environ.get("RAY_AUTH_MODE") or "not set"
        raise ConfigError(
            f"this process cannot join a Ray cluster at '{address}' ({error}). Start one with `ray start --head`, and give the "
            "address it prints as trainer.ray_address or RAY_ADDRESS. A cluster with a token needs RAY_AUTH_MODE=token here too "
            f"(it is {mode}), and the same token on all machines: docs/gpus.md"
        ) from error


def reserve(trainer: TrainerConfig) -> tuple[PlacementGroup, dict[str, float]]:
    """Waits until the run's devices are free on every machine, and reserves them: one bundle per machine.

    Also returns what Ray reserves for a worker, as options of its actor.

    Raises:
        EngineError: they were not free within `trainer.start_timeout_seconds`.
    """
    machines = trainer.nnodes
    devices = trainer.n_gpus_per_node
    has_gpus = ray.cluster_resources().get("GPU", 0.0) > 0
    bundle = {"CPU": _CPUS_PER_WORKER * devices}
    if has_gpus:
        bundle["GPU"] = float(devices)
    strategy = "STRICT_SPREAD" if machines > 1 else "STRICT_PACK"
    group = placement_group([bundle] * machines, strategy=strategy, name="cepo")
    machines_in_words = "1 machine" if machines == 1 else f"{machines} machines"
    what = f"{machines_in_words} with {devices} {'GPUs' if has_gpus else 'workers'} each"
    with phase(f"waiting for {what}"):
        if not group.wait(timeout_seconds=trainer.start_timeout_seconds):
            remove_placement_group(group)
            num_gpus = ray.cluster_resources().get("GPU", 0.0)
            num_free = ray.available_resources().get("GPU", 0.0)
            raise EngineError(
                f"the run needs {what}; the cluster has {len(ray.nodes())} machines with {num_gpus:g} GPUs in all, of which "
                f"{num_free:g} are free. Add machines with `ray start --address=...`, end other programs there, or lower "
                "trainer.nnodes and trainer.n_gpus_per_node"
            )
    return group, {"num_cpus": _CPUS_PER_WORKER, "num_gpus": 1 if has_gpus else 0}


def worker_environment(devices_per_machine: int) -> dict[str, str]:
    """Returns the environment variables that workers inherit, without secrets, which belong to `ray start`."""
    cores = os.cpu_count() or 1
    environment = {"OMP_NUM_THREADS": str(max(1, cores // devices_per_machine))}
    for name, value in os.environ.items():
        if name.startswith(_PASSED_ON) and not is_secret(name):
            environment[name] = value
    return environment
