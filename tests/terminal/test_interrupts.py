"""Ctrl-C while libraries are imported ends the process at once; a swallowed one is raised again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cepo.terminal import interrupts

REPOSITORY = Path(__file__).resolve().parents[2]
PLUGIN = "import interrupted_library\n"
LIBRARY = """
import os, signal, time
os.kill(os.getpid(), getattr(signal, os.environ["WITH_SIGNAL"]))
time.sleep(60)
"""


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize("form", [("cepo.train",), ("cepo", "config")])
def test_an_interruption_within_an_import_ends_with_its_code(
    form: tuple[str, ...], name: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "interrupted_library.py").write_text(LIBRARY)
    (tmp_path / "plugin.py").write_text(PLUGIN)
    environment = {**os.environ, "WITH_SIGNAL": name, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(tmp_path)])}
    done = subprocess.run(
        [sys.executable, "-m", *form, "config=configs/microgeo/base.yaml", f"trainer.plugins=[{tmp_path}/plugin.py]"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert done.returncode == code
    assert done.stderr == "interrupted while libraries were being loaded; no work had started\n"


class _Interrupted:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_swallowed_interruption_is_raised_at_the_next_look() -> None:
    handler_before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background job begins with it ignored
    try:
        with interrupts.handled():
            interrupts.raise_if_lost()
            interrupted = _Interrupted()
            del interrupted  # Python prints what a destructor raises, and goes on
            with pytest.raises(KeyboardInterrupt):
                interrupts.raise_if_lost()
    finally:
        signal.signal(signal.SIGINT, handler_before)


def test_handlers_are_restored_and_ignored_signals_stay_so() -> None:
    handler_before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.handled():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is interrupts._handle
    finally:
        signal.signal(signal.SIGINT, handler_before)
    assert signal.getsignal(signal.SIGTERM) is not interrupts._handle


def test_an_interrupted_process_cleans_up_and_ends_at_once() -> None:
    program = (
        "import atexit, sys\n"
        "from cepo.terminal import interrupts\n"
        "class Crashes:\n"
        "    def __del__(self): sys.stderr.write('taken down')\n"
        "kept = Crashes()\n"
        "atexit.register(lambda: sys.stderr.write('cleaned up'))\n"
        "interrupts.exit_process(130)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 130
    assert done.stderr == "cleaned up"
