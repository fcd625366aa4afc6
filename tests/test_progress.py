"""Work that lasts shows how far it has come: one line a minute in a log, a bar on a terminal, nothing where it is short."""

from __future__ import annotations

import io
import logging

import pytest

from cepo import progress
from cepo.progress import Progress, shown


class _Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_a_log_gets_one_line_a_minute(clock: _Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Short work says nothing."""
    with caplog.at_level(logging.INFO, logger="cepo"):
        for seconds in (25, 5):
            for _ in shown(range(10), "scoring"):
                clock.now += seconds
    assert caplog.messages == [
        "scoring: 3 of 10 after 75 s, about 175 s left",
        "scoring: 6 of 10 after 150 s, about 100 s left",
        "scoring: 9 of 10 after 225 s, about 25 s left",
    ]


@pytest.mark.parametrize(("seconds", "draws", "drawn"), [(3.0, None, True), (0.1, None, False), (3.0, False, False)])
def test_a_terminal_gets_a_bar_after_2_seconds(
    clock: _Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    seconds: float,
    draws: bool | None,
    drawn: bool,
) -> None:
    terminal = _Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Progress("updating", 4, draws=draws) as bar:
        for _ in range(4):
            clock.now += seconds
            bar.update()
    assert ("updating" in terminal.getvalue()) == drawn
    assert caplog.messages == []


def test_an_error_within_the_work_passes_through() -> None:
    def work() -> None:
        for number in shown(range(3), "scoring"):
            if number == 1:
                raise ValueError("in the work")

    with pytest.raises(ValueError, match="in the work"):
        work()
