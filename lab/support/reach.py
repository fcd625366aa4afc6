"""Finds the tests that run a line of the code, from the record of `lab/branches.py`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path

from lab.support.mutations import Mutant, lines_that_run_it
from lab.support.warm_tests import REPOSITORY

STAGES = (8.0, 40.0)
"""Limits in seconds of the stages of tests that run together; the last stage is the budget."""


class Reach:
    """The tests that run each line and their times, from the record of `lab/branches.py`."""

    def __init__(self, folder: Path) -> None:
        from coverage import CoverageData

        self._data = CoverageData(str(folder / "data"))
        self._data.read()
        self._paths = {path.rpartition("/cepo/")[2]: path for path in self._data.measured_files()}
        self._seconds: dict[str, float] = {}
        for file in sorted(folder.glob("seconds-*.json")):
            self._seconds |= json.loads(file.read_text(encoding="utf-8"))
        self._tests: dict[str, list[str]] = defaultdict(list)
        for test in self._seconds:
            self._tests[test.partition("::")[0]].append(test)

    def stages(self, mutant: Mutant, budget: float, *, without: Collection[str]) -> list[list[str]]:
        """Returns the tests that run the mutant's line in growing stages, by file, the quickest file first.

        Lines that ran during a test's setup count for all tests of its file.
        """
        source = (REPOSITORY / "cepo" / mutant.file).read_text(encoding="utf-8")
        contexts = self._contexts(mutant.file)
        lines = lines_that_run_it(mutant, source)
        reached = {context for line in lines or contexts for context in contexts.get(line, ())}
        by_file: dict[str, list[str]] = {}
        for file, tests in self._tests.items():
            if found := [test for test in tests if {file, test} & reached and test not in without]:
                by_file[file] = found
        cost = {file: sum(self._seconds[test] for test in each) for file, each in by_file.items()}
        stages, passed, limits = [[]], 0.0, [*STAGES, budget]
        for file in sorted(by_file, key=lambda file: cost[file]):
            if passed + cost[file] > budget and passed:
                break
            while limits[1:] and passed + cost[file] > limits[0] and stages[-1]:
                stages.append([])
                limits.pop(0)
            stages[-1] += by_file[file]
            passed += cost[file]
        return [stage for stage in stages if stage]

    def _contexts(self, file: str) -> dict[int, set[str]]:
        """Returns tests and test files by line; child processes have their test's name with the phase from pytest."""
        if file not in self._paths:
            return {}
        found: dict[int, set[str]] = {}
        for line, contexts in self._data.contexts_by_lineno(self._paths[file]).items():
            called = {context.removesuffix(" (call)") for context in contexts}
            found[line] = {context.partition("::")[0] if context.endswith(")") else context for context in called}
        return found

    def seconds(self, tests: Iterable[str]) -> float:
        """Returns how long the tests took in total."""
        return sum(self._seconds[test] for test in tests)

    def test_in(self, failure: str) -> str | None:
        """Returns the test that a line of pytest's summary names; names may contain characters that end other names."""
        named = failure.partition(" ")[2]
        return max((test for test in self._seconds if named.startswith(test)), key=len, default=None)
