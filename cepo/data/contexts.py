"""Builds contexts: the student's prompt, and a teacher's prompt, which also contains a reference."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace

from cepo.algorithms.settings import TeacherConfig
from cepo.data.dataset import Problem
from cepo.data.hints import HintTemplate, sanitise_reference
from cepo.errors import DataError
from cepo.models.inputs import EncodedPrompt, Turn
from cepo.models.processing import MARKS, Processing
from cepo.types import Reference

logger = logging.getLogger(__name__)

_PART_OF_A_NUMBER = re.compile(r"[\d.,]*\d[.,]*\Z")


class ContextBuilder:
    """Builds student and teacher contexts of at most `max_context_length` tokens.

    The teacher sees the student's images, those of `data.teacher_image_key`, or none (`teacher.with_images`).
    """

    def __init__(self, processing: Processing, teacher: TeacherConfig, *, max_context_length: int) -> None:
        self._processing, self._teacher = processing, teacher
        if not teacher.with_images:
            logger.warning("teacher.with_images is false: teachers score answers about images that they do not see")
        self.template = HintTemplate(teacher.placement, teacher.template)
        self._special_texts = processing.special_texts
        self._max_context_length = max_context_length

    def student(self, problem: Problem) -> EncodedPrompt:
        """Encodes the student's prompt; raises `DataError` if it is too long, because a question is never cut."""
        visuals = self._processing.load_images(problem.images, problem.image_source, problem.videos)
        prompt = self._processing.encode(problem.text, visuals, history=problem.history)
        if problem.teacher_images:
            shown = self._processing.load_images(problem.teacher_images, problem.teacher_image_source, problem.videos)
            prompt = replace(prompt, teacher_images=shown)
        if len(prompt.token_ids) > self._max_context_length:
            raise DataError(
                f"row {problem.prompt_id}: the prompt has {len(prompt.token_ids)} tokens; data.max_prompt_length is "
                f"{self._max_context_length}"
            )
        return prompt

    def reference_text(self, reference: Reference) -> str:
        """Returns the reference as the teacher sees it: sanitised, and a text cut to its maximum length; may be empty.

        Sampled tokens are never cut here: their sanitised text may encode longer than it was sampled, and its end may
        be the answer.
        """
        text = self.whole_text(reference)
        if reference.token_ids is not None:
            return text
        return self._cut(text, reference.max_tokens or self._teacher.max_reference_tokens)

    def whole_text(self, reference: Reference) -> str:
        """Returns the sanitised reference without a maximum length."""
        if reference.token_ids is not None:
            return sanitise_reference(self._processing.decode(reference.token_ids), self._special_texts)
        assert reference.text is not None
        return sanitise_reference(reference.text, self._special_texts)

    def teacher(self, problem: Problem, student: EncodedPrompt, reference_text: str) -> EncodedPrompt:
        """Encodes the student's user turn with `reference_text` and, if configured, images, without a length limit."""
        images = student.images if student.teacher_images is None else student.teacher_images
        text, history = problem.text, problem.history
        if not self._teacher.with_images:
            images, (text, history) = None, _without_marks(problem)
        rendered = self.template.render(prompt=text, reference=reference_text)
        if self._teacher.placement != "assistant_prefix":
            return self._processing.encode(rendered, images, history=history)
        return self._processing.encode(text, images, history=history, assistant_prefix=rendered)

    def fitted(
        self, problem: Problem, student: EncodedPrompt, reference_text: str, *, is_answer: bool
    ) -> tuple[EncodedPrompt, str] | None:
        """Returns a teacher's context within the prompt limit and its reference text, or None if no reference fits.

        A long text is cut at its end. An answer is dropped instead, because the beginning of an answer is a different
        answer. Images are never cut.
        """
        context = self.teacher(problem, student, reference_text)
        excess = len(context.token_ids) - self._max_context_length
        while excess > 0:
            kept = len(self._processing.encode_text(reference_text)) - excess
            reference_text = "" if is_answer or kept <= 0 else self._cut(reference_text, kept)
            if not reference_text:
                return None
            context = self.teacher(problem, student, reference_text)
            excess = len(context.token_ids) - self._max_context_length
        return context, reference_text

    def blind(self, problem: Problem) -> EncodedPrompt:
        """Encodes the student's prompt without its images and videos."""
        text, history = _without_marks(problem)
        return self._processing.encode(text, None, history=history)

    def _cut(self, text: str, num_tokens: int) -> str:
        """Returns the first `num_tokens` tokens of a text; a number that the cut would split is dropped."""
        tokens = self._processing.encode_text(text)
        if len(tokens) <= num_tokens:
            return text
        kept = self._processing.decode(tokens[:num_tokens]).rstrip("\ufffd")
        rest = self._processing.decode(tokens)[len(kept) :]  # not of `text`: tokenizers compose accents
        if re.match(r"[.,]?\d", rest):
            kept = _PART_OF_A_NUMBER.sub("", kept)
        return kept.rstrip()


def _without_marks(problem: Problem) -> tuple[str, Sequence[Turn]]:
    """Returns the problem's text and the turns before it without placeholders of images and videos."""
    texts = [problem.text, *(turn.text for turn in problem.history)]
    for mark in MARKS:
        texts = [text.replace(mark, "") for text in texts]
    return texts[0], [Turn(turn.role, text) for turn, text in zip(problem.history, texts[1:], strict=True)]
