"""Defines a worker process that counts the bytes that it sends to other ranks, and records them after every step."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cepo.runtime.network import prepare_own_cluster
from lab.support.collectives import Count, install, sharding_of

prepare_own_cluster()  # before the next lines import Ray
from ray.util.queue import Queue  # noqa: E402

from cepo.runtime.rank_process import ProcessGroupAddress, RankProcess  # noqa: E402


class CountingRank(RankProcess):
    """Replaces `RankProcess` in a counted run; see `counts_of`."""

    def __init__(self, folder: str, log_file: str) -> None:
        super().__init__(folder, log_file)
        self._counts = Path(log_file).with_suffix(".counts.jsonl")
        self._count = Count()

    def build(self, content: bytes, meeting: ProcessGroupAddress, arrivals: Queue | None = None) -> bytes:
        built = super().build(content, meeting, arrivals)
        assert self._worker is not None
        self._write({"sharding": asdict(sharding_of(self._worker.actor, meeting.num_ranks))})
        install(self._count)
        return built

    def call(self, method: str, message: bytes) -> bytes:
        answer = super().call(method, message)
        if method == "synchronise_rollout":  # a step's last call, and one before the first step
            self._write(self._count.drain())
        return answer

    def _write(self, line: dict[str, Any]) -> None:
        with self._counts.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")


def counts_of(run_folder: Path, rank: int) -> list[dict[str, Any]]:
    """Returns the records of `rank`: its sharding, then one per weight synchronisation with its generator."""
    file = run_folder / "logs" / f"rank_{rank}.counts.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
