"""Contexts: what the student reads, and what a teacher reads once a reference is put beside the question."""

from __future__ import annotations

import logging

from cepo.algorithms.settings import TeacherConfig
from cepo.data.dataset import Problem
from cepo.errors import DataError
from cepo.models.inputs import EncodedPrompt, ImageInputs
from cepo.models.processing import MARKS, Processing
from cepo.models.turns import Turn
from cepo.teacher.hints import HintTemplate, sanitise_reference
from cepo.types import Reference

logger = logging.getLogger(__name__)


class ContextBuilder:
    """Builds student and teacher contexts of the same pictures.

    Args:
        teacher: placement, wording and cap of references.
        max_context_length: tokens a context may have; a reference is cut to fit, a student prompt is not.
    """

    def __init__(self, processing: Processing, teacher: TeacherConfig, *, max_context_length: int) -> None:
        self._processing, self._teacher = processing, teacher
        if not teacher.with_images:
            logger.warning("teacher.with_images is false: teachers judge answers about pictures they do not see")
        self._template = HintTemplate(teacher.placement, teacher.template)
        self._special_texts = processing.special_texts
        self._max_context_length = max_context_length

    def student(self, problem: Problem) -> EncodedPrompt:
        """The student's prompt.

        Raises:
            DataError: it is too long; the reference may be cut, the question may not.
        """
        pictures = self._processing.load_visuals(problem.images, problem.videos, problem.picture_source)
        prompt = self._processing.encode(problem.text, pictures, history=problem.history)
        if len(prompt.token_ids) > self._max_context_length:
            raise DataError(
                f"row {problem.prompt_id}: the prompt has {len(prompt.token_ids)} tokens; data.max_prompt_length is "
                f"{self._max_context_length}"
            )
        return prompt

    def reference_text(self, reference: Reference) -> str:
        """The reference as it will be shown: sanitised, at most its cap of tokens long; empty if nothing is left."""
        if reference.token_ids is not None:
            text, cap = self._processing.decode(reference.token_ids), len(reference.token_ids)
        else:
            assert reference.text is not None
            text, cap = reference.text, reference.max_tokens or self._teacher.max_reference_tokens
        return self._cut(sanitise_reference(text, self._special_texts), cap)

    def teacher(self, problem: Problem, student: EncodedPrompt, reference_text: str) -> EncodedPrompt:
        """The student's own user turn with the reference in its place, around the same pictures; see `fitted`."""
        return self.fitted(problem, student, reference_text)[0]

    def fitted(self, problem: Problem, student: EncodedPrompt, reference_text: str) -> tuple[EncodedPrompt, str]:
        """The teacher's context, and the reference as it stands there.

        A reference that no longer fits is cut from its end, down to nothing; pictures never are.
        """
        images = student.images if self._teacher.with_images else None
        context = self._encode(problem, images, reference_text)
        excess = len(context.token_ids) - self._max_context_length
        while excess > 0 and reference_text:
            kept = len(self._processing.encode_text(reference_text)) - excess
            reference_text = self._cut(reference_text, max(kept, 0))
            context = self._encode(problem, images, reference_text)
            excess = len(context.token_ids) - self._max_context_length
        return context, reference_text

    def _encode(self, problem: Problem, images: ImageInputs | None, reference_text: str) -> EncodedPrompt:
        text, history = problem.text, problem.history
        if not self._teacher.with_images:
            text, history = _without_marks(text), [Turn(turn.role, _without_marks(turn.text)) for turn in history]
        rendered = self._template.render(prompt=text, reference=reference_text)
        if self._teacher.placement != "assistant_prefix":
            return self._processing.encode(rendered, images, history=history)
        return self._processing.encode(text, images, history=history, assistant_prefix=rendered)

    def _cut(self, text: str, num_tokens: int) -> str:
        tokens = self._processing.encode_text(text)
        return text if len(tokens) <= num_tokens else self._processing.decode(tokens[:num_tokens]).rstrip("\ufffd ")


def _without_marks(text: str) -> str:
    for mark in MARKS:
        text = text.replace(mark, "")
    return text
