"""A program that renders chat templates, which are untrusted programs, in transformers' sandbox and with limits."""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Any

from cepo.trees import Tree

_MOST_BYTES = 2 << 30
"""The address space of the process; without a template it takes about 0.2 GiB."""
_MOST_ERROR_CHARACTERS = 1000


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
