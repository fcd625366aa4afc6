"""Builds contexts: the student's prompt, and a teacher's prompt, which also contains a reference.

The texts of models and datasets are sanitised before they enter one. The wording is a user's Jinja template.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import StrictUndefined
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import SandboxedEnvironment

from cepo.algorithms.settings import TeacherConfig
from cepo.errors import ConfigError, DataError
from cepo.files.safe_files import read_text
from cepo.models.interface import EncodedPrompt, ImageSource, Turn, Video
from cepo.models.patch_mask import PatchMask
from cepo.models.processing import Processing
from cepo.models.text_codec import MARKS, TextCodec
from cepo.types import ImageReference, RolloutGroup, TokenReference, WordedReference

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

TEMPLATES = {
    "user_suffix": "{{ prompt }}\nHere is a sample answer: {{ reference }}",
    "assistant_prefix": "{{ reference }}\n",
}
"""The built-in template of each placement: the whole user text, or the text between assistant header and response."""
_PROBE = "Question"

_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)
"""Matches control, invisible and direction characters, tags, and lone surrogates, which cannot be encoded."""


_PART_OF_A_NUMBER = re.compile(r"[\d.,]*\d[.,]*\Z")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One row of the data, prepared for prompts."""

    prompt_id: str  # the row number in the source; unchanged by filtering and shuffling
    text: str  # the user's (last) text after the format prompt, with one `<image>` or `<video>` for each of them
    images: tuple[Image, ...] = field(repr=False)  # decoded, in RGB
    ground_truth: str
    solution: str | None
    columns: dict[str, Any] = field(repr=False)  # the row's other columns, for reward functions
    image_source: ImageSource | None = None  # where `images` can be read again; None with videos or without a source
    # What teachers see instead of `images`, as many; empty if they see the same.
    teacher_images: tuple[Image, ...] = field(default=(), repr=False)
    teacher_image_source: ImageSource | None = None
    videos: tuple[Video, ...] = field(default=(), repr=False)
    history: tuple[Turn, ...] = ()  # the turns before `text` if the prompt is a conversation


class UserTemplate:
    """Parses and renders a template in a sandbox. It must use the variable `needed`, and may use those in `others`.

    `origin` names it in errors, which are all `ConfigError`.
    """

    def __init__(self, source: str, origin: str, needed: str, *others: str) -> None:
        environment = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
        self._origin = origin
        try:
            self._template = environment.from_string(source)
            used = find_undeclared_variables(environment.parse(source))
        except Exception as error:  # Jinja also raises the errors of expressions that it evaluates in advance
            raise ConfigError(f"{origin} does not parse: {error}") from error
        if needed not in used or used - {needed, *others}:
            raise ConfigError(
                f"{origin} uses the variables {', '.join(sorted(used)) or '(none)'}; needed: {needed}, written "
                f"{{{{ {needed} }}}}; further accepted: {', '.join(others) or '(none)'}"
            )

    def render(self, **values: str) -> str:
        """Returns the text with the values, which are not treated as templates themselves."""
        try:
            return self._template.render(**values)
        except Exception as error:  # a template is a program: it can raise anything
            raise ConfigError(f"{self._origin} cannot be rendered: {type(error).__name__}: {error}") from error


class HintTemplate(UserTemplate):
    """Renders a template with the variables `prompt` (the student's user text) and `reference`.

    The placement determines what the template produces. `user_suffix`: the user text, which begins with the prompt, so
    that student and teacher contexts share their tokens up to the reference. `free`: any user text that contains the
    prompt exactly once. `assistant_prefix`: the text right before the response.
    """

    def __init__(self, placement: str, path: str | None = None) -> None:
        if path is None:
            source = TEMPLATES.get(placement)
            origin = f"the built-in wording of {placement}"
        else:
            source = read_text(Path(path)).removesuffix("\n")
            origin = f"teacher.template {path}"
        if source is None:
            raise ConfigError(
                f"teacher.placement {placement} has no built-in wording; name a Jinja file in teacher.template"
            )
        super().__init__(source, origin, "reference", "prompt")
        text = self.render(prompt=_PROBE, reference="1")
        if placement == "user_suffix" and not text.startswith(_PROBE):
            raise ConfigError(
                f"{origin} must begin with the prompt for teacher.placement user_suffix; use placement free"
            )
        if placement == "free" and text.count(_PROBE) != 1:
            raise ConfigError(f"{origin} must contain the prompt exactly once, so no image is lost or repeated")


def sanitise_reference(text: str, special_texts: Iterable[str]) -> str:
    """Removes everything from a model's or dataset's text that no context may contain.

    White space, including every kind of line break, is collapsed to single spaces. Control characters are removed.
    Special-token texts (control tokens, image placeholders) are removed until none is left, because removing one, or
    the spaces within one, can join the halves of another.
    """
    distinct_specials = {special for special in special_texts if special}
    specials = sorted(distinct_specials, key=len, reverse=True)
    # Spaces first: line breaks are control characters too, and removing them would turn "1\r2" into "12".
    visible = _CONTROL_CHARACTERS.sub("", _with_single_spaces(text))
    text = _with_single_spaces(visible)
    while any(special in text for special in specials):
        for special in specials:
            text = text.replace(special, "")
        text = _with_single_spaces(text)
    return text


def _with_single_spaces(text: str) -> str:
    return " ".join(text.split())


class ReferenceTexts:
    """Words what a teacher reads: `template` places it, and `reference_text` is the text of a reference."""

    def __init__(self, codec: TextCodec, teacher: TeacherConfig) -> None:
        if not teacher.with_images:
            logger.warning("teacher.with_images is false: teachers score answers about images that they do not see")
        self._codec = codec
        self._teacher = teacher
        self.template = HintTemplate(teacher.placement, teacher.template)
        self._special_texts = codec.special_texts

    def reference_text(self, reference: WordedReference) -> str:
        """Returns the reference as the teacher sees it: sanitised, and a text cut to its maximum length; may be empty.

        Sampled tokens are never cut here: their sanitised text may encode longer than it was sampled, and its end may
        be the answer.
        """
        text = self.whole_text(reference)
        if isinstance(reference, TokenReference):
            return text
        max_tokens = reference.max_tokens or self._teacher.max_reference_tokens
        return self.shortened(text, max_tokens)

    def whole_text(self, reference: WordedReference) -> str:
        """Returns the sanitised reference without a maximum length."""
        text = self._codec.decode(reference.token_ids) if isinstance(reference, TokenReference) else reference.text
        return sanitise_reference(text, self._special_texts)

    def shortened(self, text: str, num_tokens: int) -> str:
        """Returns the first `num_tokens` tokens of a text; a number that the cut would split is dropped."""
        tokens = self._codec.encode_text(text)
        if len(tokens) <= num_tokens:
            return text
        beginning = self._codec.decode(tokens[:num_tokens]).rstrip("\ufffd")
        whole = self._codec.decode(tokens)  # not `text`: tokenizers compose accents
        remainder = whole[len(beginning) :]
        if re.match(r"[.,]?\d", remainder):
            beginning = _PART_OF_A_NUMBER.sub("", beginning)
        return beginning.rstrip()


class ContextBuilder(ReferenceTexts):
    """Builds contexts of at most `max_context_length` tokens.

    The teacher sees the student's images, those of `data.teacher_image_key`, or none (`teacher.with_images`).
    """

    def __init__(self, processing: Processing, teacher: TeacherConfig, *, max_context_length: int) -> None:
        super().__init__(processing, teacher)
        self._processing = processing
        self._max_context_length = max_context_length

    def for_another_thread(self) -> ContextBuilder:
        """Returns an equal builder with a tokenizer of its own, because calls change the state of a tokenizer."""
        twin = copy(self)
        twin._processing = twin._codec = Processing(**self._processing.arguments)
        return twin

    def student(self, problem: Problem) -> EncodedPrompt:
        """Encodes the student's prompt; raises `DataError` if it is too long, because a question is never cut."""
        visuals = self._processing.load_images(problem.images, problem.image_source, problem.videos)
        prompt = self._processing.encode(problem.text, visuals, history=problem.history)
        if problem.teacher_images:
            teacher_images = self._processing.load_images(
                problem.teacher_images, problem.teacher_image_source, problem.videos
            )
            prompt = replace(prompt, teacher_images=teacher_images)
        if len(prompt.token_ids) > self._max_context_length:
            raise DataError(
                f"row {problem.prompt_id}: the prompt has {len(prompt.token_ids)} tokens; data.max_prompt_length is "
                f"{self._max_context_length}"
            )
        return prompt

    def teacher(self, problem: Problem, student: EncodedPrompt, reference_text: str) -> EncodedPrompt:
        """Encodes the student's user turn with `reference_text` and, if configured, images, without a length limit."""
        if self._teacher.with_images:
            images = student.images if student.teacher_images is None else student.teacher_images
            text = problem.text
            history = problem.history
        else:
            images = None
            text, history = _without_marks(problem)
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
        while True:
            context = self.teacher(problem, student, reference_text)
            excess = len(context.token_ids) - self._max_context_length
            if excess <= 0:
                return context, reference_text
            num_tokens = len(self._processing.encode_text(reference_text)) - excess
            if is_answer or num_tokens <= 0:
                return None
            reference_text = self.shortened(reference_text, num_tokens)
            if not reference_text:
                return None

    def blind(self, problem: Problem) -> EncodedPrompt:
        """Encodes the student's prompt without its images and videos."""
        text, history = _without_marks(problem)
        return self._processing.encode(text, None, history=history)

    def masked(self, problem: Problem, student: EncodedPrompt, mask: PatchMask) -> EncodedPrompt:
        """Returns the student's prompt with its own images and videos masked, whose tokens are therefore the same."""
        images = self._processing.load_masked(problem.images, mask, problem.image_source, problem.videos)
        assert student.images is not None and images.expansions == student.images.expansions, "sizes are unchanged"
        return replace(student, images=images, teacher_images=None)


def mask_for(group: RolloutGroup, reference: ImageReference) -> PatchMask:
    """Returns the mask of a prompt's images in one step, which the reference, seed, step and prompt determine."""
    assert reference.masked is not None, "the reference has no images"
    seed = f"mask/{group.seed}/{group.step}/{group.prompt_id}"
    return PatchMask(probability=reference.masked, seed=seed, square=reference.square)


def _without_marks(problem: Problem) -> tuple[str, Sequence[Turn]]:
    """Returns the problem's text and the turns before it without placeholders of images and videos."""
    history = [Turn(turn.role, _without_marks_in(turn.text)) for turn in problem.history]
    return _without_marks_in(problem.text), history


def _without_marks_in(text: str) -> str:
    while any(mark in text for mark in MARKS):  # removing one can join the halves of another
        for mark in MARKS:
            text = text.replace(mark, "")
    return text
