"""The Ray cluster that a run starts for itself: who can reach it, and what happens when a part of it dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
pytestmark = pytest.mark.heavy

PRELUDE = """
import json, os, signal, sys, time, psutil, ray
from cepo.config.trainer_schema import TrainerConfig
from cepo.errors import WorkerLostError
from cepo.runtime.ray import cluster

def part(name):
    return next(each for each in psutil.Process().children(recursive=True) if each.name() == name)

def answer():
    return ray.get(ray.remote(lambda: 7).remote(), timeout=60)
"""


def driver(script: str, **environment: str) -> Any:
    """What a process of its own prints as its last line, which is JSON."""
    # Without the token of a cluster that another test has started in this process.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
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


def test_every_port_is_on_loopback_and_wants_the_token() -> None:
    seen = driver("""
cluster.connect(TrainerConfig())
file = os.environ["RAY_AUTH_TOKEN_PATH"]
family = {os.getpid(), *(each.pid for each in psutil.Process().children(recursive=True))}
ports = [each.laddr.ip for each in psutil.net_connections("inet") if each.status == "LISTEN" and each.pid in family]
environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
environment |= {"HOME": "/nonexistent", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
stranger = "from ray._raylet import GcsClient; GcsClient(address=%r)" % ray.get_runtime_context().gcs_address
import subprocess
refused = subprocess.run([sys.executable, "-c", stranger], env=environment, capture_output=True, text=True, timeout=120)
print(json.dumps({
    "ports": ports, "mode": oct(os.stat(file).st_mode & 0o777), "answer": answer(), "stranger": refused.returncode,
    "why": refused.stderr[-4000:],
}))
""")
    assert seen["answer"] == 7
    assert len(seen["ports"]) >= 4
    assert {address.removeprefix("::ffff:") for address in seen["ports"]} == {"127.0.0.1"}
    assert seen["mode"] == "0o600"
    assert seen["stranger"] != 0
    assert "InvalidAuthToken" in seen["why"]


def test_the_head_does_not_grow_with_the_number_of_calls() -> None:
    """By default Ray records 100,000 calls, and 2,000 more made the head larger by 6 MB."""
    seen = driver("""
cluster.connect(TrainerConfig())
caller = ray.remote(type("Caller", (), {"call": lambda self, value: value})).remote()

def size_after(calls):
    for _ in range(calls // 100):
        ray.get([caller.call.remote(bytes(2000)) for _ in range(100)])
    time.sleep(2.5)  # Ray's processes report their calls every second
    return part("gcs_server").memory_info().rss

before = size_after(2500)
print(json.dumps({"grown": size_after(2000) - before}))
""")
    assert seen["grown"] < 3_000_000


def test_a_cluster_that_lost_a_part_is_named_and_replaced() -> None:
    seen = driver("""
lost = []
cluster.connect(TrainerConfig())
for name in ("gcs_server", "raylet"):
    cluster.require_alive()
    victim = part(name)
    victim.kill()
    victim.wait()
    try:
        cluster.require_alive()
    except WorkerLostError as error:
        lost.append(str(error).replace(str(victim.pid), "N"))
    cluster.connect(TrainerConfig())
print(json.dumps({"lost": lost, "answer": answer()}))
""")
    assert seen["lost"] == [
        f"the Ray cluster of this run has lost its {name} (process N); the run continues from its last checkpoint, "
        "at most trainer.max_restarts times"
        for name in ("gcs_server", "raylet")
    ]
    assert seen["answer"] == 7


def test_a_stopped_raylet_does_not_keep_the_process_alive() -> None:
    """Ray's own shutdown waited more than 260 s for it; ours gives up after 20 s, 4 s here, and kills."""
    begun = time.monotonic()
    seen = driver("""
from cepo.runtime.ray import own_cluster
own_cluster._SHUTDOWN_SECONDS = 4.0
cluster.connect(TrainerConfig())
folder = os.path.dirname(os.environ["RAY_AUTH_TOKEN_PATH"])
victim = part("raylet")
victim.suspend()
print(json.dumps({"folder": folder, "pid": victim.pid}))
""")
    assert time.monotonic() - begun < 120
    assert not Path(seen["folder"]).exists()
    assert not Path(f"/proc/{seen['pid']}").exists()
