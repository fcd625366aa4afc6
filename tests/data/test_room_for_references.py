"""What becomes of a reference for which the context has no room: a text is cut, an answer is never half an answer."""

from __future__ import annotations

import pytest

from cepo.algorithms.settings import TeacherConfig
from cepo.data.prompts import ContextBuilder, Problem
from cepo.microgeo.world import ASSETS
from cepo.models.processing import Processing

ANSWER = "12 + 34 + 56 + 78"
PROBLEM = Problem(prompt_id="0", text="How long?", images=(), ground_truth=ANSWER, solution=None, columns={})


@pytest.mark.parametrize("missing", [1, 4, 8])
def test_an_answer_without_room_is_dropped_and_a_text_is_cut(missing: int) -> None:
    """The context has room for all of the reference's tokens but 1, 4 or 8."""
    processing = Processing(str(ASSETS))
    widest = ContextBuilder(processing, TeacherConfig(), max_context_length=1000)
    student = widest.student(PROBLEM)
    whole = widest.teacher(PROBLEM, student, ANSWER)
    limit = len(whole.token_ids)
    builder = ContextBuilder(processing, TeacherConfig(), max_context_length=limit)
    for is_answer in (True, False):
        assert builder.fitted(PROBLEM, student, ANSWER, is_answer=is_answer) == (whole, ANSWER)
    builder = ContextBuilder(processing, TeacherConfig(), max_context_length=limit - missing)
    assert builder.fitted(PROBLEM, student, ANSWER, is_answer=True) is None
    fitted = builder.fitted(PROBLEM, student, ANSWER, is_answer=False)
    assert fitted is not None
    context, text = fitted
    assert ANSWER.startswith(text)
    assert 0 < len(text) < len(ANSWER)
    assert len(context.token_ids) <= limit - missing
