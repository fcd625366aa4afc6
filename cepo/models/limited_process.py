"""A process with limits of time and memory, which reads what a model folder brings: chat templates and tokenizers.

A template is a program, and a tokenizer's file can take native code forever. `ask` sends a request to the process, which
`python -m cepo.models.limited_process` runs; each process of the run has its own, which lives as long as it answers.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import cepo
from cepo.files.trees import Fields

_MOST_BYTES = 2 << 30
"""The address space of the process; without a template it takes about 0.2 GiB."""
_PACKAGE_PARENT = str(Path(cepo.__file__).resolve().parent.parent)

_processes: dict[int, subprocess.Popen[bytes]] = {}
_locks: dict[int, threading.Lock] = {}
"""The limited process of each process and its lock, because a forked process must not share its parent's."""


def ask(work: str, request: Fields, *, seconds: float) -> tuple[str, Any]:
    """Returns what the process answers to a request for one of the `works` of `main`.

    The answer is a kind with what belongs to it; ("memory", the limit) or ("ended", the exit code) if the work ended the
    process. It is ended by SIGPROF after `seconds` of processor time.
    """
    message = json.dumps({"work": work, "seconds": seconds, "request": request})
    this_process = os.getpid()
    lock = _locks.setdefault(this_process, threading.Lock())
    with lock:
        process = _processes.pop(this_process, None) or _start()  # kept only if it answers this request
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        line = b""
        with suppress(BrokenPipeError):  # it ended before it read the request
            process.stdin.write(message.encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if not line:
            process.communicate()
            return "ended", process.returncode
        _processes[this_process] = process
    kind, answer = json.loads(line)
    return kind, answer


def _start() -> subprocess.Popen[bytes]:
    python_path = [_PACKAGE_PARENT]
    if os.environ.get("PYTHONPATH"):
        python_path.append(os.environ["PYTHONPATH"])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(python_path),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "cepo.models.limited_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )


def main() -> None:
    """Answers requests until the standard input ends, one line of JSON each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    from cepo.models.chat_template import render
    from cepo.models.tokenizer_parts import read_tokenizer

    works = {"render": render, "tokenizer": read_tokenizer}
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    for line in sys.stdin.buffer:
        message = json.loads(line)
        work = works[message["work"]]
        # Processor time, so that a paused machine exceeds no limit. The signal ends the process, in whatever code it is.
        signal.setitimer(signal.ITIMER_PROF, message["seconds"])
        try:
            answer: tuple[str, Any] = work(message["request"])
        except MemoryError:
            answer = "memory", f"{_MOST_BYTES >> 30} GiB"
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
