"""Settles, before Ray is imported, who reaches a run's own cluster, and whether a cluster answers at an address."""

from __future__ import annotations

import atexit
import os
import re
import secrets
import socket
import subprocess
import sys

from cepo.errors import ConfigError
from cepo.files.temp_folders import OwnFolder

CONNECTION_SECONDS = 3.0
ANSWER_SECONDS = 30.0
_ADDRESS = re.compile(r"(?:ray://)?\[?(?P<host>[^/\]]+)\]?:(?P<port>\d{1,5})")
_REACHABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's switch for laptops: with 0, all servers of a cluster listen on loopback. ray.init has no argument for this."""


def prepare_own_cluster() -> None:
    """Sets the variables that Ray reads at its import: a cluster of this process stays on loopback and needs a token.

    The token is for this process's clusters alone; only this user can enter the folder (mode 0700) of its file. A
    user's own RAY_AUTH_MODE, RAY_AUTH_TOKEN and RAY_AUTH_TOKEN_PATH are left unchanged. Further calls change nothing.

    Raises:
        ConfigError: Ray was imported without these variables, and is not connected to a cluster, which would be used.
    """
    has_token = any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if has_token and os.environ.get(_REACHABLE) == "0":
        return
    ray = sys.modules.get("ray")
    if ray is not None:
        if ray.is_initialized():
            return
        raise ConfigError(
            "Ray was imported before this run could close its own Ray cluster to others, which Ray allows only at its import: "
            "import Ray after cepo.train.train has begun, call ray.init before it, or start Python with "
            f"{_REACHABLE}=0, RAY_AUTH_MODE=token and a secret RAY_AUTH_TOKEN"
        )
    os.environ[_REACHABLE] = "0"
    if has_token:
        return
    folder = OwnFolder("ray-token")
    atexit.register(folder.remove)
    file = folder.path / "auth_token"
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as opened:
        opened.write(secrets.token_hex(32))
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(file)


def why_no_answer(address: str) -> str | None:
    """Returns the reason why no Ray cluster can be at an address, or None if there may be one.

    For `host:port` the command `ray status` decides, because ray.init ends this process, without an exception, if what
    answers is not Ray or wants another token. For `ray://host:port` only the connection is tested, for others nothing.
    """
    parts = _ADDRESS.fullmatch(address)
    if parts is None:
        return None
    try:
        socket.create_connection((parts["host"], int(parts["port"])), timeout=CONNECTION_SECONDS).close()
    except (OSError, OverflowError) as error:
        return str(error)
    if address.startswith("ray://"):
        return None
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
    try:
        status = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"`ray status` had no answer from it within {ANSWER_SECONDS:g} s"
    if status.returncode == 0:
        return None
    lines = status.stderr.splitlines() or ["no reason"]
    return f"`ray status`: {lines[-1]}"
