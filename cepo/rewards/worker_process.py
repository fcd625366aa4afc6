"""Runs a reward worker process: `python -m cepo.rewards.worker_process`, started by `cepo.rewards.pool`, never by hand.

It is a fresh interpreter, not a fork (the trainer has threads and devices) and not a `multiprocessing` child (which
would run the user's main script again).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cepo
from cepo.files.trees import Tree
from cepo.rewards.contract import BatchContractError, ContractError, RewardFailure

_PACKAGE_FOLDER = os.path.dirname(os.path.abspath(cepo.__file__)) + os.sep
_PARENT_CHECK_SECONDS = 2.0
_GRACE_SECONDS = 2.0
_BUSY_CORES = 4
_LONGEST_DESCRIPTION = 500


def main() -> None:
    """Loads the reward function that the first message names, then answers tasks until the parent has ended."""
    # The parent handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # a child process of a reward function must not hold the connection open
    with suppress(OSError):  # makes Linux kill this process rather than the trainer when memory runs out
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    connection = Connection(descriptor)
    with suppress(EOFError, ConnectionError):  # the parent has ended
        setup = connection.recv()
        sys.path[:] = setup["sys_path"]
        _serve(setup, connection)
    os.killpg(0, signal.SIGKILL)


def _serve(setup: Tree, connection: Connection) -> None:
    from cepo.answers import equal, marked_answer, states_the_same, value_key
    from cepo.rewards.contract import load_answer_function, load_reward

    _limit_processor_time(setup["start_seconds"])
    try:
        # Builds the parser's tables now, so that they do not count towards the first sample's time limit, and before a file
        # beside the reward's can have the name of a library that the comparison of answers imports.
        equal(r"\frac{1}{2}", r"\sqrt{3}")
        reward = load_reward(setup["spec"], setup["kwargs"], setup["weights"])
        answer_function = setup["answer_function"]
        extract = marked_answer if answer_function is None else load_answer_function(answer_function)
    except (Exception, SystemExit) as error:
        connection.send(("failed", str(error)))
        return
    connection.send(("ready", (reward.reward_type, reward.needs_images)))

    def score(samples: list[Any], first: int) -> list[Any]:
        if answer_function is not None:
            samples = [{**sample, "extracted_answer": extract(sample["response"])} for sample in samples]
        return reward.score(samples, first_sample=first)

    actions: dict[str, Callable[[list[Any], int], list[Any]]] = {
        "score": score,
        "extract": lambda responses, _: [extract(response) for response in responses],
        "value": lambda answers, _: [value_key(answer) for answer in answers],
        "match": lambda pairs, _: [states_the_same(*pair) for pair in pairs],
    }
    while True:
        action, first, items = connection.recv()
        _limit_processor_time(setup["timeout_seconds"])
        connection.send(_attempt(actions[action], items, first))


def _attempt(action: Callable[[list[Any], int], list[Any]], items: list[Any], first: int) -> tuple[str, Any]:
    """Returns ("done", results), ("refused", why no sample of a batch can be scored), or ("raised", a `RewardFailure`)."""
    try:
        return "done", action(items, first)
    except BatchContractError as error:
        return "refused", str(error)
    except (Exception, SystemExit) as error:
        description = f"{type(error).__name__}: {error}"[:_LONGEST_DESCRIPTION]
        if isinstance(error, ContractError):
            return "raised", RewardFailure(reason=description, details=str(error), breaks_contract=True)
        frames = traceback.extract_tb(error.__traceback__)
        location = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
        users_frames = [frame for frame in frames if not frame.filename.startswith(_PACKAGE_FOLDER)]
        details = "".join(traceback.format_list(users_frames or frames)) + description
        return "raised", RewardFailure(reason=description + location, details=details)


def _limit_processor_time(seconds: float) -> None:
    """Ends this process after so long on 4 cores, even in C code, if its parent has died and cannot end it."""
    signal.setitimer(signal.ITIMER_PROF, _BUSY_CORES * (seconds + _GRACE_SECONDS))


def _end_after(parent: int) -> None:
    """Ends the process group after the parent, even while a call runs or another process holds the connection."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_SECONDS)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
