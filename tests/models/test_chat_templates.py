"""A chat template is a stranger's program: in its sandbox it reaches nothing, and its failure is an error with a message."""

from __future__ import annotations

from pathlib import Path

import pytest

from cepo.errors import DataError
from cepo.models.processing import Processing


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for i in range(10 ** 12) %}x{% endfor %}", "OverflowError"),
        ("{{ raise_exception('one role alone') }}", "TemplateError"),
    ],
)
def test_a_failing_chat_template_is_an_error_of_ours(tiny_model_folder: Path, template: str, kind: str) -> None:
    processing = Processing(str(tiny_model_folder), chat_template=template)
    with pytest.raises(DataError, match=f"the chat template refuses messages of the roles user: {kind}: "):
        processing.template_ids("What is x?")
