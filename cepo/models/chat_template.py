"""Runs a model's chat template, an untrusted program, in transformers' sandbox and in a process with limits."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import cepo
from cepo.errors import ConfigError, DataError
from cepo.trees import Fields, Tree

SECONDS = 10.0
"""The processor time of one rendering, which normally takes about a millisecond."""
MOST_OWN_CHARACTERS = 1_000_000
"""The maximum number of characters that a template may add to the texts of a conversation."""
_MOST_BYTES = 2 << 30
"""The address space of the process; without a template it takes about 0.2 GiB."""
_MOST_ERROR_CHARACTERS = 1000
_PACKAGE_PARENT = str(Path(cepo.__file__).resolve().parent.parent)


class ChatTemplate:
    """Renders conversations with a processor's chat template. `origin` names the template in errors."""

    def __init__(self, processor: Any, origin: str) -> None:
        self._processor, self._origin = processor, origin

    def render(self, messages: Sequence[Fields]) -> str:
        """Returns the conversation as text that ends with the assistant header.

        Raises:
            ConfigError: there is no template, it does not parse, takes too long or too much memory, or writes too much.
            DataError: the template refuses the roles, their order, or the content.
        """
        roles = "messages of the roles " + ", ".join(message["role"] for message in messages)
        request = {
            "messages": messages,
            "variables": self._variables(),
            "seconds": SECONDS,
            "most_characters": MOST_OWN_CHARACTERS + len(str(messages)),
        }
        kind, found = _reply(request)
        if kind == "text":
            return found
        if kind == "raised":
            raise DataError(f"{self._origin} refuses {roles}: {found}")
        if kind == "ended" and found == -signal.SIGPROF:
            raise self.error(f"is not done with {roles} within {SECONDS:g} s of processor time")
        how = {"unparsable": "does not parse: {}", "memory": "takes more than {} for " + roles}
        how |= {"characters": "makes {:,} characters of " + roles, "ended": "ends its process with code {} at " + roles}
        raise self.error(how[kind].format(found))

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"{self._origin} {what}; name another template in data.override_chat_template")

    def _variables(self) -> Tree:
        chosen = self._processor.chat_template
        chosen = chosen.get("default") if isinstance(chosen, dict) else chosen
        if chosen is None:
            raise self.error("is missing")
        tokenizer = getattr(self._processor, "tokenizer", self._processor)
        return {**tokenizer.special_tokens_map, "chat_template": chosen}


_processes: dict[int, subprocess.Popen[bytes]] = {}
_locks: dict[int, threading.Lock] = {}
"""The renderer of each process and its lock, because a forked process must not share its parent's."""


def _reply(request: Fields) -> tuple[str, Any]:
    """Returns what `main` answers, or ("ended", the exit code) if rendering ended the process."""
    with _locks.setdefault(os.getpid(), threading.Lock()):
        process = _processes.pop(os.getpid(), None) or _start()  # kept only if it answers this request
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        line = b""
        with suppress(BrokenPipeError):  # it ended before it read the request
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if not line:
            process.communicate()
            return "ended", process.returncode
        _processes[os.getpid()] = process
        kind, found = json.loads(line)
        return kind, found


def _start() -> subprocess.Popen[bytes]:
    python_path = [_PACKAGE_PARENT, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "cepo.models.chat_template"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(python_path), "OMP_NUM_THREADS": "1"},
    )


def main() -> None:
    """Answers requests until the standard input ends, one line of JSON each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    from transformers.utils.chat_template_utils import render_jinja_template

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        # Processor time, so that a paused machine exceeds no limit. The signal ends the process, in whatever code it is.
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        reply = _attempt(render_jinja_template, request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


def _attempt(render: Any, request: Tree) -> tuple[str, Any]:
    """Returns ("text", the conversation), ("characters", how many are too many), or the kind of an error and its text."""
    from jinja2 import TemplateSyntaxError

    try:
        texts, _ = render([request["messages"]], add_generation_prompt=True, **request["variables"])
        if len(texts[0]) > request["most_characters"]:
            return "characters", len(texts[0])
        # No tokenizer accepts a lone surrogate.
        return "text", texts[0].encode("utf-8", errors="replace").decode("utf-8")
    except MemoryError:
        return "memory", f"{_MOST_BYTES >> 30} GiB"
    except Exception as error:  # a template is a program: it can raise anything
        kind = "unparsable" if isinstance(error, TemplateSyntaxError) else "raised"
        return kind, f"{type(error).__name__}: {error}"[:_MOST_ERROR_CHARACTERS]


if __name__ == "__main__":
    main()
