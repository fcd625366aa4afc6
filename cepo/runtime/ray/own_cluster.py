"""Starts a Ray cluster for one run, on this machine, on the loopback interface only, and protected by a token."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

import psutil
import ray

from cepo.errors import EngineError, WorkerLostError
from cepo.leftovers import OwnFolder
from cepo.runtime.reach import prepare_own_cluster

logger = logging.getLogger(__name__)

_SHUTDOWN_SECONDS = 20.0


class OwnCluster:
    """A Ray cluster that this process starts, and that ends with it.

    Other users of the machine can reach its loopback ports, but cannot run anything, since only this user can read the
    token (`prepare_own_cluster`) and enter the folder (mode 0700) of Ray's own folder.

    Args:
        options: further arguments of `ray.init`.

    Raises:
        ConfigError: Ray was imported before `prepare_own_cluster` was called.
        EngineError: Ray does not start here.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        prepare_own_cluster()
        self._folder = OwnFolder("ray")
        atexit.register(self.end)
        earlier = set(psutil.Process().children())
        logger.info("starting Ray on this machine")
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                num_cpus=os.cpu_count(),
                _temp_dir=str(self._folder.path / "r"),  # Ray opens it to all users; a short name, for its sockets
                **options,
            )
        except Exception as error:
            raise EngineError(f"Ray cannot be started on this machine: {type(error).__name__}: {error}") from error
        finally:
            self._processes = {
                process: process.name() for process in psutil.Process().children() if process not in earlier
            }
        logger.info("started Ray on this machine, its files in %s", self._folder.path)

    def require_alive(self) -> None:
        """Checks that all processes of the cluster run.

        Raises:
            WorkerLostError: one has ended. Ray's calls would wait for it forever, and Ray would later end this process.
        """
        for process, name in self._processes.items():
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                raise WorkerLostError(
                    f"the Ray cluster of this run has lost its {name} (process {process.pid}); the run continues from its last "
                    "checkpoint, at most trainer.max_restarts times"
                )

    def end(self) -> None:
        """Ends the cluster within a minute, even if its processes hang or have already ended."""
        atexit.unregister(self.end)
        try:
            self.require_alive()
            is_down = _shut_down()
        except WorkerLostError:
            is_down = False
        if not is_down:
            for process in self._processes:
                _kill_tree(process)
            _shut_down()
        self._folder.remove()


def _shut_down() -> bool:
    """Returns whether Ray's library left the cluster in time; it waits indefinitely for stopped processes."""
    leaving = threading.Thread(target=ray.shutdown, daemon=True)
    leaving.start()
    leaving.join(_SHUTDOWN_SECONDS)
    return not leaving.is_alive()


def _kill_tree(process: psutil.Process) -> None:
    try:
        tree = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for each in tree:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(tree, timeout=5)
