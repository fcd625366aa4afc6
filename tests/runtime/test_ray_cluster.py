"""What a Ray cluster's processes are given, and what a killed one leaves behind."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("ray")

from cepo.runtime.ray.cluster import worker_environment


def test_workers_get_the_engines_variables_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"HF_HOME": "/hub", "NCCL_SOCKET_IFNAME": "eth1", "VLLM_CPU_KVCACHE_SPACE": "2", "PYTHONPATH": "/code"}
    given |= {"TOKENIZERS_PARALLELISM": "false"}  # a token of another kind
    kept_back = {"HF_TOKEN": "x", "VLLM_API_KEY": "x", "HOME": "/root", "CUDA_VISIBLE_DEVICES": "0"}
    for name, value in (given | kept_back).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    passed = worker_environment(devices_per_machine=8)
    assert given.items() <= passed.items()
    assert not kept_back.keys() & passed.keys()
    assert passed["OMP_NUM_THREADS"] == "1"
    assert worker_environment(devices_per_machine=3)["OMP_NUM_THREADS"] == "4"
