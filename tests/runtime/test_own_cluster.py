"""The Ray cluster that a run starts for itself: who can reach it, and what workers inherit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("ray")
from cepo.runtime.cluster import worker_environment

PRELUDE = """
import json, os, pathlib, psutil
from cepo.runtime.network import prepare_own_cluster, why_no_answer
prepare_own_cluster()
import ray
from cepo.config.schema import TrainerConfig
from cepo.errors import ConfigError
from cepo.runtime import cluster

def answer():
    return ray.get(ray.remote(lambda: 7).remote(), timeout=60)
"""


def driver(script: str, **environment: str) -> Any:
    """What a process of its own prints as its last line, which is JSON."""
    # Without what is prepared for the clusters of this process.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.heavy
def test_every_port_is_on_loopback_and_wants_the_token() -> None:
    seen = driver("""
cluster.connect(TrainerConfig())
token, of_ray = os.environ["RAY_AUTH_TOKEN_PATH"], str(pathlib.Path(ray._private.worker._global_node.get_temp_dir_path()).parent)
family = {os.getpid(), *(each.pid for each in psutil.Process().children(recursive=True))}
ports = [each.laddr.ip for each in psutil.net_connections("inet") if each.status == "LISTEN" and each.pid in family]
address, answered = ray.get_runtime_context().gcs_address, answer()
why = [why_no_answer(address)]
os.environ["RAY_AUTH_TOKEN"] = "0" * 64
why.append(why_no_answer(address))
print(json.dumps({
    "ports": ports, "modes": [oct(os.stat(each).st_mode & 0o777) for each in (token, os.path.dirname(token), of_ray)],
    "beside": sorted(os.listdir(os.path.dirname(token))), "answer": answered, "why": why,
}))
""")
    assert seen["answer"] == 7
    assert len(seen["ports"]) >= 4
    assert {address.removeprefix("::ffff:") for address in seen["ports"]} == {"127.0.0.1"}
    assert seen["modes"] == ["0o600", "0o700", "0o700"]
    assert seen["beside"] == ["auth_token"]
    with_its_token, with_another = seen["why"]
    assert with_its_token is None
    assert "InvalidAuthToken" in with_another


@pytest.mark.heavy
def test_a_program_that_imported_ray_itself_must_have_a_cluster() -> None:
    """Without one it is told, because Ray would listen on all networks, and a late token keeps it from starting."""
    seen = driver("""
for name in [name for name in os.environ if name.startswith("RAY_")]:
    del os.environ[name]
try:
    cluster.connect(TrainerConfig())
except ConfigError as error:
    told = str(error)
print(json.dumps({"told": told, "variables": [name for name in os.environ if name.startswith("RAY_AUTH")]}))
""")
    assert seen["told"].startswith("Ray was imported before this run could close its own Ray cluster to others")
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0, RAY_AUTH_MODE=token and a secret RAY_AUTH_TOKEN" in seen["told"]
    assert seen["variables"] == []


def test_workers_get_the_engines_variables_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"HF_HOME": "/hub", "NCCL_SOCKET_IFNAME": "eth1", "VLLM_CPU_KVCACHE_SPACE": "2", "PYTHONPATH": "/code"}
    variables |= {"TOKENIZERS_PARALLELISM": "false"}  # a token of another kind
    kept_back = {"HF_TOKEN": "x", "VLLM_API_KEY": "x", "HOME": "/root", "CUDA_VISIBLE_DEVICES": "0"}
    for name, value in (variables | kept_back).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    passed = worker_environment(devices_per_machine=8)
    assert variables.items() <= passed.items()
    assert not kept_back.keys() & passed.keys()
    assert passed["OMP_NUM_THREADS"] == "1"
    assert worker_environment(devices_per_machine=3)["OMP_NUM_THREADS"] == "4"
