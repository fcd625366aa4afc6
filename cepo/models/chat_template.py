"""Runs a model's chat template, an untrusted program, in transformers' sandbox and with a time limit."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cepo.errors import ConfigError, DataError

SECONDS = 10.0
"""The time limit of one rendering, which normally takes about a millisecond."""
MOST_OWN_CHARACTERS = 1_000_000
"""The maximum number of characters that a template may add to the texts of a conversation."""


class ChatTemplate:
    """Renders conversations with a processor's chat template. `origin` names the template in errors."""

    def __init__(self, processor: Any, origin: str) -> None:
        self._processor, self._origin, self._is_checked = processor, origin, False

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns the conversation as text that ends with the assistant header.

        Raises:
            ConfigError: the template does not parse, takes too long, or writes too much.
            DataError: the template refuses the roles, their order, or the content.
        """
        self._require_bounded()
        roles = ", ".join(message["role"] for message in messages)
        try:
            with _within(SECONDS):
                text: str = self._processor.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=True
                )
        except TimeoutError as error:
            raise self.error(f"is not done with messages of the roles {roles} within {SECONDS:g} s") from error
        except Exception as error:  # a template is a program: it can raise anything
            raise DataError(
                f"{self._origin} refuses messages of the roles {roles}: {type(error).__name__}: {error}"
            ) from error
        if len(text) > MOST_OWN_CHARACTERS + len(str(messages)):
            raise self.error(f"makes {len(text):,} characters of messages of the roles {roles}")
        return text.encode("utf-8", errors="replace").decode("utf-8")  # no tokenizer accepts a lone surrogate

    def error(self, what: str) -> ConfigError:
        """Returns an error that names the template and the remedy."""
        return ConfigError(f"{self._origin} {what}; name another template in data.override_chat_template")

    def _require_bounded(self) -> None:
        """Refuses operations that no time limit can interrupt: powers, products of unknown numbers, `round`."""
        if self._is_checked:
            return
        chosen = self._processor.chat_template
        for source in chosen.values() if isinstance(chosen, dict) else [chosen or ""]:
            try:
                tree = _ENVIRONMENT.parse(source)
            except (TemplateSyntaxError, RecursionError) as error:
                raise self.error(f"does not parse: {type(error).__name__}: {error}") from error
            for node in tree.find_all((nodes.Pow, nodes.Mul, nodes.Filter)):
                if isinstance(node, nodes.Pow) or (isinstance(node, nodes.Filter) and node.name == "round"):
                    raise self.error(f"uses ** or the filter round in line {node.lineno}, which may take forever")
                if isinstance(node, nodes.Mul) and not any(
                    isinstance(side, nodes.Const) for side in (node.left, node.right)
                ):
                    raise self.error(f"multiplies unknown values in line {node.lineno}, which may take forever")
        self._is_checked = True


class _Generation(Extension):
    """Parses the tag around an assistant's text, which transformers accepts too."""

    tags: ClassVar[set[str]] = {"generation"}  # pyright: ignore[reportIncompatibleVariableOverride]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_ENVIRONMENT = ImmutableSandboxedEnvironment(extensions=[_Generation, loopcontrols])


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raises `TimeoutError` in this thread, between two Python instructions, if the block takes longer than `seconds`.

    It is raised again every second, because Python drops exceptions that arrive while it finalises an object.
    """
    thread, lock, done = threading.get_ident(), threading.Lock(), threading.Event()

    def stop() -> None:
        wait = seconds
        while not done.wait(wait):
            with lock:
                if not done.is_set():
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeoutError))
            wait = 1.0

    threading.Thread(target=stop, daemon=True).start()
    try:
        yield
    finally:
        while not done.is_set():
            with suppress(TimeoutError), lock:  # an escaping TimeoutError would keep `stop` raising forever
                done.set()
