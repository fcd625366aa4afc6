"""Runs a reward worker process: `python -m cepo.rewards.serving`, started by `cepo.rewards.process`, never by hand.

It is a fresh interpreter, not a fork (the trainer has threads and devices) and not a `multiprocessing` child (which
would run the user's main script again). It ends when its parent has ended: at once if idle, else soon after the time
limit. Processes that the reward function started end with it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import IO, Any

import cepo
from cepo.leftovers import end_marked
from cepo.rewards.contract import BatchContractError, ContractError, Failure
from cepo.rewards.process import MARK

_PACKAGE_FOLDER = os.path.dirname(os.path.abspath(cepo.__file__)) + os.sep
_PARENT_CHECK_SECONDS = 2.0
_GRACE_SECONDS = 2.0


def main() -> None:
    """Loads the reward function that the first message names, then answers tasks until the parent has ended."""
    # The parent handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent, descriptor = os.getppid(), int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # a child process of a reward function must not hold the connection open
    connection = Connection(descriptor)
    _offer_to_memory_killer()
    try:
        setup = connection.recv()
        sys.path[:] = setup["sys_path"]
        with open(os.devnull, "w") as devnull:
            _serve(setup, connection, parent, devnull)
    except (EOFError, ConnectionError):
        return
    finally:
        end_marked(MARK, os.environ[MARK])


def _serve(setup: dict[str, Any], connection: Connection, parent: int, devnull: IO[str]) -> None:
    from cepo.rewards.answers import answers_equal, states_the_same, value_key
    from cepo.rewards.combined import load_reward
    from cepo.rewards.functions import load_answer_function

    with _Deadline(setup["start_seconds"] + _GRACE_SECONDS, devnull):
        try:
            reward = load_reward(setup["spec"], setup["kwargs"], setup["weights"])
            own = setup["answer_function"]
            extract = load_answer_function(own) if own is not None else None
            # Builds the parser's tables now, so that they do not count towards the first sample's time limit.
            answers_equal(r"\frac{1}{2}", r"\sqrt{3}")
        except (Exception, SystemExit) as error:
            connection.send(("failed", str(error)))
            return
    connection.send(("ready", (reward.name, reward.reward_type)))

    def score(samples: list[Any], first: int) -> list[Any]:
        if extract is not None:
            samples = [{**sample, "extracted_answer": extract(sample["response"])} for sample in samples]
        return reward.score(samples, first_sample=first)

    actions: dict[str, Callable[[list[Any], int], list[Any]]] = {
        "score": score,
        "extract": lambda responses, _: [extract(response) if extract else None for response in responses],
        "value": lambda answers, _: [value_key(answer) for answer in answers],
        "match": lambda pairs, _: [states_the_same(*pair) for pair in pairs],
    }
    limit = setup["timeout_seconds"] + _GRACE_SECONDS
    while _wait_for_request(connection, parent):
        action, one_by_one, first, items = connection.recv()
        units = [[item] for item in items] if one_by_one else [items]
        for position, unit in enumerate(units):
            with _Deadline(limit, devnull):
                reply = _attempt(actions[action], unit, first + position)
            connection.send(reply)


def _attempt(action: Callable[[list[Any], int], list[Any]], unit: list[Any], first: int) -> tuple[str, Any]:
    """Returns ("done", results), ("refused", why no sample of a batch can be scored), or ("raised", a `Failure`)."""
    try:
        return "done", action(unit, first)
    except BatchContractError as error:
        return "refused", str(error)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
        words = f"{type(error).__name__}: {error}"[:500]
        if isinstance(error, ContractError):
            return "raised", Failure(reason=words, details=str(error), breaks_contract=True)
        own = [frame for frame in frames if not frame.filename.startswith(_PACKAGE_FOLDER)] or frames
        details = "".join(traceback.format_list(own)) + words
        return "raised", Failure(reason=words + place, details=details)


class _Deadline:
    """Ends this process at a deadline, even while C code holds the interpreter lock.

    The parent kills an overdue worker earlier; this is for workers whose parent has died.
    """

    def __init__(self, seconds: float, devnull: IO[str]) -> None:
        self._seconds = seconds
        self._devnull = devnull

    def __enter__(self) -> None:
        faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._devnull)

    def __exit__(self, *_: object) -> None:
        faulthandler.cancel_dump_traceback_later()


def _wait_for_request(connection: Connection, parent: int) -> bool:
    """Returns False once the parent has ended, even if another process still holds the connection's other end."""
    while os.getppid() == parent:
        if connection.poll(_PARENT_CHECK_SECONDS):
            return True
    return False


def _offer_to_memory_killer() -> None:
    """Makes Linux kill this process rather than the trainer when memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        # Not Linux, or not permitted; this is optional.
        return


if __name__ == "__main__":
    main()
