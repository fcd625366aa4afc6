"""Samples and grades continuations of prefixes, and stores the verdicts in a file from which a measurement resumes."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from cepo.credit.session import Session
from cepo.credit.stored import read_whole
from cepo.credit.truth import Continued, Prefix
from cepo.foreign_files import read_objects
from cepo.progress import Progress
from cepo.rollout.generator import Generation, GenerationRequest, sampling_seed
from cepo.tracking.lines import LineFile
from cepo.trainer.asking import Rollouts, correctness, reward_input, training_settings

FILE = "continuations.jsonl"
CONTINUATION_STEP = -2
"""The step in the sampling seeds of continuations. Neither training nor validation uses it."""
_PREFIXES_AT_ONCE = 64


class Continuations:
    """The continuations of a measurement, stored in `folder`.

    Args:
        number: M, the number of continuations per prefix.
    """

    def __init__(self, folder: Path, session: Session, rollouts: Rollouts, *, number: int) -> None:
        self._path, self._session, self._rollouts, self._number = folder / FILE, session, rollouts, number
        with read_whole(self._path):
            rows = read_objects(self._path, within=folder) if self._path.exists() else ()
            self.done: dict[str, Continued] = {row["prefix"]: _read(row) for row in rows}

    def missing(self, prefixes: Sequence[Prefix]) -> list[Prefix]:
        """Returns the prefixes that have not been continued yet."""
        return [prefix for prefix in prefixes if prefix.name not in self.done]

    def sample(self, prefixes: Sequence[Prefix], *, most_parts: int | None = None) -> float:
        """Samples the missing continuations, of at most `most_parts` parts; returns the seconds this took.

        Raises:
            EngineError, RewardError: sampling or grading failed.
        """
        missing = self.missing(prefixes)
        start = time.perf_counter()
        with (
            closing(LineFile(self._path)) as file,
            Progress("sampling continuations", len(missing) * self._number) as progress,
        ):
            for part in self._parts(missing)[:most_parts]:
                for prefix, continued in zip(part, self._continue(part), strict=True):
                    file.append(_row(prefix, continued))
                    self.done[prefix.name] = continued
                progress.update(len(part) * self._number)
        return time.perf_counter() - start

    def _parts(self, prefixes: Sequence[Prefix]) -> list[list[Prefix]]:
        """Splits prefixes into parts of similar length that are sampled together, in random order.

        All continuations of a part get the maximum length of its shortest prefix. To fit into the engine's context, a
        longer prefix joins only if its prompt is shorter than the longest allowed one by at least the difference.
        """
        free = self._session.config.data.max_prompt_length
        parts: list[list[Prefix]] = []
        for prefix in sorted(prefixes, key=lambda prefix: len(prefix.tokens)):
            longer = len(prefix.tokens) - len(parts[-1][0].tokens) if parts else 0
            has_room = longer <= free - len(self._rollouts.prompts[prefix.problem].token_ids)
            if not parts or len(parts[-1]) == _PREFIXES_AT_ONCE or not has_room:
                parts.append([])
            parts[-1].append(prefix)
        random.Random(0).shuffle(parts)  # the time of all is estimated from the first
        return parts

    def _continue(self, prefixes: Sequence[Prefix]) -> list[Continued]:
        session, rollouts = self._session, self._rollouts
        settings = training_settings(session.config.worker.rollout, session.config.data)
        longest = settings.max_response_length
        shortest = min(len(prefix.tokens) for prefix in prefixes)
        settings = dataclasses.replace(settings, num_samples=self._number, max_response_length=longest - shortest)
        sampled = session.backend.generate([self._request(prefix) for prefix in prefixes], settings)
        groups = [
            [_cut(one, longest - len(prefix.tokens)) for one in group]
            for prefix, group in zip(prefixes, sampled, strict=True)
        ]
        # Equal responses to a problem are graded once.
        whole = [
            [(prefix.problem, prefix.tokens + one.response_ids) for one in group]
            for prefix, group in zip(prefixes, groups, strict=True)
        ]
        distinct = list(dict.fromkeys(response for group in whole for response in group))
        inputs = [
            reward_input(
                rollouts.problems[problem],
                session.asker.decoded(tokens),
                len(tokens),
                session.rewards.needs_images,
            )
            for problem, tokens in distinct
        ]
        outcome = session.rewards.score(inputs)
        session.rewards.require_a_score(outcome)
        algorithm = session.config.algorithm
        correct = correctness(outcome.scores, algorithm.correct_key, algorithm.correct_threshold).tolist()
        verdicts = dict(zip(distinct, correct, strict=True))
        return [
            _continued([verdicts[response] for response in responses], group)
            for responses, group in zip(whole, groups, strict=True)
        ]

    def _request(self, prefix: Prefix) -> GenerationRequest:
        problem, prompt = self._rollouts.problems[prefix.problem], self._rollouts.prompts[prefix.problem]
        seed = self._session.config.worker.rollout.seed
        return GenerationRequest(
            prompt_ids=(*prompt.engine_ids, *prefix.tokens),
            num_prompt_tokens=len(prompt.token_ids) + len(prefix.tokens),
            images=problem.images,
            videos=problem.videos,
            seed=sampling_seed(seed, CONTINUATION_STEP, prefix.name),
            image_source=problem.image_source,
        )


def expected_tokens(prefixes: Sequence[Prefix], rollouts: Rollouts, *, number: int) -> int:
    """Estimates the tokens of `number` continuations of each prefix from the lengths of its problem's responses."""
    lengths: Mapping[int, list[int]] = defaultdict(list)
    for row, generation in enumerate(rollouts.generations):
        lengths[row // rollouts.group_size].append(len(generation.response_ids))
    total = 0.0
    for prefix in prefixes:
        rest = [length - len(prefix.tokens) for length in lengths[prefix.problem] if length > len(prefix.tokens)]
        total += number * sum(rest) / len(rest)
    return round(total)


def _cut(one: Generation, limit: int) -> Generation:
    """Cuts a continuation at the limit, which equals sampling with it: the noise does not depend on the limit."""
    if len(one.response_ids) <= limit:
        return one
    return Generation(response_ids=one.response_ids[:limit], log_probs=one.log_probs[:limit], finished=False)


def _continued(verdicts: Sequence[bool], group: Sequence[Generation]) -> Continued:
    first = [-one.log_probs[0] for one in group]
    return Continued(
        verdicts=tuple(verdicts),
        entropy=sum(first) / len(first),
        num_tokens=sum(len(one.response_ids) for one in group),
    )


def _row(prefix: Prefix, continued: Continued) -> dict[str, object]:
    return {
        "prefix": prefix.name,
        "length": len(prefix.tokens),
        "right": "".join("1" if verdict else "0" for verdict in continued.verdicts),
        "entropy": continued.entropy,
        "num_tokens": continued.num_tokens,
    }


def _read(row: Mapping[str, object]) -> Continued:
    return Continued(
        verdicts=tuple(mark == "1" for mark in str(row["right"])),
        entropy=float(str(row["entropy"])),
        num_tokens=int(str(row["num_tokens"])),
    )
