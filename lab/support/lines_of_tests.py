"""Records, as a pytest plugin, which test covers which line, and the processor seconds of each test.

Lines that run during a test's setup are recorded under its file, because a fixture may serve all tests of the file.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from coverage import Coverage

_seconds: Counter[str] = Counter()


def _record_under(context: str) -> None:
    current = Coverage.current()
    assert current is not None, "COVERAGE_PROCESS_START is not set"
    current.switch_context(context)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    _record_under(item.location[0])
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    _record_under(item.nodeid)
    try:
        return (yield)
    finally:
        _record_under(item.location[0])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = os.times()
    try:
        return (yield)
    finally:
        # User and system time, including that of finished child processes.
        _seconds[item.nodeid] += sum(os.times()[:4]) - sum(before[:4])


def pytest_sessionfinish() -> None:
    file = Path(os.environ["COVERAGE_PROCESS_START"]).with_name(f"seconds-{os.getpid()}.json")
    file.write_text(json.dumps(_seconds), encoding="utf-8")
