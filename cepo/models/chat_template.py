"""Runs a model's chat template, an untrusted program, in transformers' sandbox and in a process with limits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import cepo
from cepo.errors import ConfigError, DataError

SECONDS = 10.0
"""The processor time of one rendering, which normally takes about a millisecond."""
MOST_OWN_CHARACTERS = 1_000_000
"""The maximum number of characters that a template may add to the texts of a conversation."""
_PACKAGE_PARENT = str(Path(cepo.__file__).resolve().parent.parent)


class ChatTemplate:
    """Renders conversations with a processor's chat template. `origin` names the template in errors."""

    def __init__(self, processor: Any, origin: str) -> None:
        self._processor, self._origin = processor, origin

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
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
        kind, found = _renderer(os.getpid()).reply(request)
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
        """Returns an error that names the template and the remedy."""
        return ConfigError(f"{self._origin} {what}; name another template in data.override_chat_template")

    def _variables(self) -> dict[str, Any]:
        """Returns the template and the special tokens that it may name."""
        chosen = self._processor.chat_template
        chosen = chosen.get("default") if isinstance(chosen, dict) else chosen
        if chosen is None:
            raise self.error("is missing")
        tokenizer = getattr(self._processor, "tokenizer", self._processor)
        return {**tokenizer.special_tokens_map, "chat_template": chosen}


class _Renderer:
    """Runs the process that renders templates, and another one after a template that has ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def reply(self, request: Mapping[str, Any]) -> tuple[str, Any]:
        """Returns what `template_serving` answers, or ("ended", the exit code) if rendering ended the process."""
        with self._lock:
            process, self._process = (
                self._process or _start(),
                None,
            )  # kept only if its next reply is the next request's
            assert process.stdin is not None and process.stdout is not None, "both are pipes"
            line = b""
            with suppress(BrokenPipeError):  # it ended before it read the request
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
                line = process.stdout.readline()
            if not line:
                process.communicate()
                return "ended", process.returncode
            self._process = process
            kind, found = json.loads(line)
            return kind, found


def _start() -> subprocess.Popen[bytes]:
    python_path = [_PACKAGE_PARENT, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "cepo.models.template_serving"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(python_path), "OMP_NUM_THREADS": "1"},
    )


@cache
def _renderer(process: int) -> _Renderer:
    """Returns the renderer of this process; a forked one must not share its parent's pipes."""
    return _Renderer()
