"""Starts a Ray cluster for one run, on this machine, on the loopback interface only, and protected by a token."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
import ray._raylet

from cepo.errors import EngineError, WorkerLostError
from cepo.leftovers import OwnFolder

logger = logging.getLogger(__name__)

_SHUTDOWN_SECONDS = 20.0
_MOST_RECORDED_CALLS = 1000
"""Ray's head keeps a record of 4 kB of each of the last 100,000 calls by default. We read none of them."""
# Ray's switch for laptops: with 0, all servers of a cluster listen on loopback. ray.init has no argument for this.
_REACHABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


class OwnCluster:
    """A Ray cluster that this process starts, and that ends with it.

    Other users of the machine can reach its loopback ports, but cannot run anything, since only this user can read the
    token's file (mode 0600). A user's own RAY_AUTH_MODE, RAY_AUTH_TOKEN and RAY_AUTH_TOKEN_PATH are left unchanged.

    Args:
        options: further arguments of `ray.init`.

    Raises:
        EngineError: Ray does not start here.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._folder = OwnFolder("ray")
        self._token_settings = _ask_for_token(self._folder.path / "auth_token")
        atexit.register(self.end)
        earlier = set(psutil.Process().children())
        logger.info("starting Ray on this machine")
        try:
            with _on_loopback():
                ray.init(
                    address="local",
                    include_dashboard=False,
                    num_cpus=os.cpu_count(),
                    _temp_dir=str(self._folder.path),
                    _system_config={"task_events_max_num_task_in_gcs": _MOST_RECORDED_CALLS},
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
        for name in self._token_settings:
            os.environ.pop(name, None)
        _read_token_settings()
        self._folder.remove()


def _ask_for_token(file: Path) -> dict[str, str]:
    """Creates a token and the variables that announce it to Ray; returns these, or none if the user has set any."""
    settings = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}
    if any(name in os.environ for name in (*settings, "RAY_AUTH_TOKEN")):
        return {}
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as opened:
        opened.write(secrets.token_hex(32))
    os.environ.update(settings)
    _read_token_settings()
    return settings


def _read_token_settings() -> None:
    """Makes Ray's library read the variables again: it reads them at import, and caches an earlier cluster's token."""
    library: Any = ray._raylet  # compiled, without type information
    library.Config.initialize("")
    library.AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _on_loopback() -> Iterator[None]:
    before = os.environ.get(_REACHABLE)
    os.environ[_REACHABLE] = "0"
    constants: Any = sys.modules["ray._private.ray_constants"]
    was_reachable = constants.ENABLE_RAY_CLUSTER  # read from the environment when Ray was imported
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = was_reachable
        if before is None:
            del os.environ[_REACHABLE]
        else:
            os.environ[_REACHABLE] = before


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
