"""Callbacks are checked before a run begins."""

from __future__ import annotations

import pytest

from cepo import Callback
from cepo.errors import ConfigError
from cepo.trainer.callbacks import CallbackList


class Counting(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def after_record(self, step: int, metrics: object) -> None:
        self.steps.append(step)


class Misspelt(Callback):
    def after_recrod(self, step: int, metrics: object) -> None: ...


class OfTransformers(Callback):
    """Has a hook of another library, and an attribute that is none."""

    on_disk = True

    def on_step_end(self) -> None: ...


class FreelyNamed(Callback):
    def record(self, step: int, metrics: object) -> None: ...


class Narrow(Callback):
    def after_record(self, metrics: object) -> None: ...  # type: ignore[override]


def test_one_callback_is_told_to_be_a_list() -> None:
    with pytest.raises(ConfigError, match=r"write callbacks=\[Counting\(\)\]"):
        CallbackList(Counting())  # type: ignore[arg-type]


def test_callbacks_are_called_in_their_order() -> None:
    first = Counting()
    second = Counting()
    CallbackList([first, second]).after_record(3, {})
    assert first.steps == second.steps == [3]


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (Counting, r"has the class Counting; give an instance: Counting\(\)"),
        (print, "has a builtin_function_or_method; derive it from cepo.Callback"),
        (Misspelt(), "Misspelt.after_recrod is never called. Did you mean 'after_record'?"),
        (OfTransformers(), "OfTransformers.on_step_end is never called."),
        (FreelyNamed(), "FreelyNamed has no function that is called. Known: after_sample"),
        (
            Narrow(),
            r"Narrow.after_record: .* Write def after_record\(self, step, metrics\), as Callback.after_record has it",
        ),
    ],
)
def test_what_would_never_be_called_is_refused(callback: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CallbackList([callback])  # type: ignore[list-item]
