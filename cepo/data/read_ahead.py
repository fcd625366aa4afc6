"""Reads the problems of the next round while a step computes, so that no step waits for images."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from cepo.data.prompts import ContextBuilder, Problem
from cepo.data.training_set import TrainingProblems
from cepo.models.interface import EncodedPrompt

WORTHWHILE_SECONDS = 0.5
"""The time of reading a round from which the next one is read ahead."""
MOST_BYTES = 2_000_000_000
"""The most bytes of pixels that are read ahead; the rows that remain are read by the step that needs them."""


@dataclass(frozen=True)
class ReadProblem:
    """A problem with its decoded images, and the student's prompt with the model's inputs made from them."""

    problem: Problem
    prompt: EncodedPrompt

    @property
    def num_bytes(self) -> int:
        """The bytes of pixels, decoded and preprocessed."""
        pixels = sum(3 * image.width * image.height for image in (*self.problem.images, *self.problem.teacher_images))
        pixels += sum(video.frames.nbytes for video in self.problem.videos)
        for images in (self.prompt.images, self.prompt.teacher_images):
            pixels += 0 if images is None else sum(tensor.nbytes for tensor in images.tensors.values())
        return pixels


class ProblemReader:
    """Reads the problems of rounds, of which `TrainingProblems.indices` has the order, and encodes their prompts.

    What a round has does not depend on whether it was read ahead. Errors are raised when the round is needed.
    """

    def __init__(self, problems: TrainingProblems, contexts: ContextBuilder, batch_size: int) -> None:
        self._problems = problems
        self._contexts = contexts
        self._batch_size = batch_size
        self._thread: ThreadPoolExecutor | None = None
        self._contexts_of_thread: ContextBuilder | None = None
        self._number = -1
        self._ahead: list[Future[ReadProblem | None]] = []
        self._bytes_ahead = 0
        self._seconds = 0.0

    def round(self, number: int) -> list[ReadProblem]:
        """Returns the problems of the 0-based round `number`; raises `DataError` if one cannot be read or is too long."""
        ahead = self._ahead
        self._ahead = []
        is_ahead = number == self._number and len(ahead) > 0
        begin = time.monotonic()
        try:
            indices = self._problems.indices(number, self._batch_size)
            if is_ahead:
                return [self._awaited(index, future) for index, future in zip(indices, ahead, strict=True)]
            problems = [self._read(index, self._contexts) for index in indices]
            self._seconds = time.monotonic() - begin
            return problems
        finally:
            for future in ahead:
                future.cancel()

    def read_ahead(self, number: int) -> None:
        """Begins to read a round in another thread, if its rows have images and the last round took long to read."""
        if self._problems.most_visuals == (0, 0) or self._seconds < WORTHWHILE_SECONDS:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="cepo-read-ahead")
        self._number = number
        self._bytes_ahead = 0
        indices = self._problems.indices(number, self._batch_size)
        self._ahead = [self._thread.submit(self._read_in_thread, index) for index in indices]

    def close(self) -> None:
        """Drops what was read ahead; a row that is being read is finished and dropped."""
        self._ahead = []
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None

    def _awaited(self, index: int, future: Future[ReadProblem | None]) -> ReadProblem:
        """Returns what was read ahead; a row that nobody has begun to read is read here."""
        problem = None if future.cancel() else future.result()
        return self._read(index, self._contexts) if problem is None else problem

    def _read(self, index: int, contexts: ContextBuilder) -> ReadProblem:
        problem = self._problems[index]
        return ReadProblem(problem, contexts.student(problem))

    def _read_in_thread(self, index: int) -> ReadProblem | None:
        """Returns a problem, or None if those before it already take all of the memory for reading ahead."""
        if self._bytes_ahead >= MOST_BYTES:
            return None
        if self._contexts_of_thread is None:
            self._contexts_of_thread = self._contexts.for_another_thread()
        problem = self._read(index, self._contexts_of_thread)
        self._bytes_ahead += problem.num_bytes
        return problem


def problems_and_prompts(read_problems: Sequence[ReadProblem]) -> tuple[list[Problem], list[EncodedPrompt]]:
    problems = [read_problem.problem for read_problem in read_problems]
    prompts = [read_problem.prompt for read_problem in read_problems]
    return problems, prompts
