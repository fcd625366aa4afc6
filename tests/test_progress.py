"""Work that lasts shows how far it has come: one line a minute in a log, a bar on a terminal, nothing where it is short."""

from __future__ import annotations

import io
import logging
import time
from types import SimpleNamespace

import pytest

from cepo import progress
from cepo.progress import Progress, shown


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_one_line_a_minute(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Short work says nothing."""
    now = 0.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    with caplog.at_level(logging.INFO, logger="cepo"):
        for seconds in (25, 5):
            for _ in shown(range(10), "scoring"):
                now += seconds
    assert caplog.messages == [
        "scoring: 3 of 10 after 75 s, about 175 s left",
        "scoring: 6 of 10 after 150 s, about 100 s left",
        "scoring: 9 of 10 after 225 s, about 25 s left",
    ]


@pytest.mark.parametrize(("seconds", "draws", "drawn"), [(0.6, True, True), (0.0, True, False), (0.6, False, False)])
def test_a_terminal_gets_a_bar_after_half_a_second(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seconds: float, draws: bool, drawn: bool
) -> None:
    terminal = _Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Progress("updating", 1, draws=draws) as bar:
        time.sleep(seconds)
        bar.update()
    assert ("updating" in terminal.getvalue()) == drawn
    assert caplog.messages == []
