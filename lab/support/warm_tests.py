"""Runs tests on a copy of the working tree, in forked processes that have already imported the libraries."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lab.support.mutations import Mutant

REPOSITORY = Path(__file__).resolve().parents[2]
OVERDUE = "takes longer than"
_IMPORTED_FIRST = ("cepo.train", "cepo.workers.worker", "cepo.rollout.transformers_generator", "lab.worlds.model",
                   "peft", "hypothesis", "beartype", "jaxtyping", "safetensors.torch")  # fmt: skip


def import_libraries() -> None:
    """Imports the libraries that `cepo` uses, but not `cepo` itself: each test process imports the mutated one."""
    for name in _IMPORTED_FIRST:
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.split(".")[0] == "cepo"]:
        del sys.modules[name]
    # Otherwise, garbage collection in a child process would visit, and thus copy, all objects of the libraries.
    gc.collect()
    gc.freeze()


class _OnlyInThisOrder:
    """Selects these tests from the collected files, in this order; the repository's conftest puts heavy ones first."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._places = {test: place for place, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._places), key=lambda item: self._places[item.nodeid]
        )


class Copy:
    """A copy of the working tree that is mutated and tested."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "copy"
        self._output, self._temporary = folder / "output", folder / "temporary"
        listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        files = subprocess.run(listing, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
        for name in files:
            if (REPOSITORY / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(REPOSITORY / name, self.folder / name)

    def failure_with(self, mutant: Mutant, tests: Sequence[str], seconds: float) -> str | None:
        """Runs the tests with the mutant in the code; returns the reason of a failure, None if they pass."""
        path = self.folder / "cepo" / mutant.file
        source = path.read_text(encoding="utf-8")
        assert source[mutant.start : mutant.end] == mutant.before
        path.write_text(source[: mutant.start] + mutant.after + source[mutant.end :], encoding="utf-8")
        try:
            return self.failure(tests, seconds)
        finally:
            path.write_text(source, encoding="utf-8")

    def failure(self, tests: Sequence[str], seconds: float) -> str | None:
        """Runs the tests in this order; returns the first failure, or how the tests ended; None if they pass."""
        shutil.rmtree(self._temporary, ignore_errors=True)
        process = os.fork()
        if process == 0:
            self._run(tests)
        code = _awaited(process, seconds)
        if code in (0, pytest.ExitCode.NO_TESTS_COLLECTED):  # the latter if recorded tests no longer exist
            return None
        if code is None:
            return f"{OVERDUE} {seconds:.0f} s"
        lines = self._output.read_text(encoding="utf-8", errors="replace").splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return failed[0][:300] if failed else f"pytest ended with {code}: {' '.join(lines[-3:])}"

    def _run(self, tests: Sequence[str]) -> None:
        code = 1
        try:
            os.setsid()
            output = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(self.folder)
            os.environ["PYTHONPATH"] = str(self.folder)
            # If a file is written twice within a second, the bytecode of the first version would be used.
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            sys.path[:] = [str(self.folder), *(entry for entry in sys.path if entry != str(REPOSITORY))]
            options = ["-x", "-q", "-p", "no:cacheprovider", "--show-capture=no", f"--basetemp={self._temporary}"]
            files = dict.fromkeys(test.partition("::")[0] for test in tests)
            code = pytest.main([*options, *files], plugins=[_OnlyInThisOrder(tests)])
            sys.stdout.flush()
        finally:
            os._exit(code)


def _awaited(process: int, seconds: float) -> int | None:
    """Returns the exit code of a process, None if it takes too long; kills the rest of its session."""
    end = time.monotonic() + seconds
    code = None
    while time.monotonic() < end:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.05)
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:
        return code
    if code is None:
        os.waitpid(process, 0)
    return code
