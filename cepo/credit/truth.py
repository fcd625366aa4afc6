"""Measures the truth about tokens: `V_t`, the chance of a right continuation, and `A*_t = V_{t+1} - V_t`.

Rollouts and the continuations of their prefixes are stored in the measurement's folder, from which it resumes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy
import torch
from numpy.typing import NDArray
from pydantic import Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from cepo.algorithms import credit
from cepo.config import RunConfig
from cepo.credit.session import Session
from cepo.errors import ConfigError, DataError, ForeignFileError
from cepo.files.foreign import damaged_as, irregular_file, read_json, read_objects
from cepo.files.trees import Fields, Tree, leaves
from cepo.rollout.generator import Generation, sampling_seed
from cepo.run_folder.writing import LineFile, encode_line, write_atomically
from cepo.terminal.progress import Progress
from cepo.trainer.asking import request, training_settings
from cepo.trainer.rollouts import Rollouts

Numbers = NDArray[numpy.float64]
SETTINGS_FILE = "measurement.json"
_RESPONSES_FILE = "responses.jsonl"
CONTINUATIONS_FILE = "continuations.jsonl"
_CONTINUATION_STEP = -2
"""The step in the sampling seeds of continuations. Neither training nor validation uses it."""
_PREFIXES_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """The first tokens of a response, whose continuations are sampled; `problem` is its number among the rollouts'."""

    problem: int
    prompt_id: str
    tokens: tuple[int, ...]

    @property
    def name(self) -> str:
        """The key of sampling seeds and stored continuations, the same for equal prefixes of a problem."""
        tokens = ",".join(map(str, self.tokens))
        return f"{self.prompt_id}/{hashlib.blake2b(tokens.encode(), digest_size=12).hexdigest()}"


def chosen_tokens(rollouts: Rollouts, *, num_responses: int, num_tokens: int, seed: int) -> dict[int, list[int]]:
    """Returns the measured tokens of each measured response, by the response's row; a function of the seed.

    Responses are drawn from groups whose rewards differ, since the others have no signal. If a response is longer than
    `num_tokens`, that many of its tokens are drawn. Raises `DataError` if all groups have equal rewards.
    """
    live = credit.live_rows(rollouts.rewards, rollouts.group_ids).nonzero().flatten().tolist()
    if not live:
        raise DataError(
            f"all {len(rollouts.problems)} groups of {rollouts.group_size} responses have equal rewards, so no token made a "
            "difference; give other data, another checkpoint, or more responses per problem (worker.rollout.n)"
        )
    rows = sorted(numpy.random.default_rng(seed).permutation(live)[:num_responses].tolist())
    chosen: dict[int, list[int]] = {}
    for row in rows:
        length = len(rollouts.generations[row].response_ids)
        chosen[row] = sorted(numpy.random.default_rng([seed, row]).permutation(length)[:num_tokens].tolist())
    return chosen


def prefix_of(rollouts: Rollouts, row: int, length: int) -> Prefix:
    """Returns the first `length` tokens of the response in `row`."""
    problem = row // rollouts.group_size
    tokens = rollouts.generations[row].response_ids[:length]
    return Prefix(problem=problem, prompt_id=rollouts.problems[problem].prompt_id, tokens=tokens)


def needed_prefixes(rollouts: Rollouts, chosen: Mapping[int, Sequence[int]]) -> list[Prefix]:
    """Returns the distinct prefixes before and after the chosen tokens, the shortest first, without whole responses."""
    found: dict[str, Prefix] = {}
    for row, tokens in chosen.items():
        whole = len(rollouts.generations[row].response_ids)
        for length in sorted({length for token in tokens for length in (token, token + 1) if length < whole}):
            prefix = prefix_of(rollouts, row, length)
            found[prefix.name] = prefix
    return sorted(found.values(), key=lambda prefix: (len(prefix.tokens), prefix.problem, prefix.tokens))


def claim_folder(folder: Path, own: Fields, config: RunConfig) -> None:
    """Writes the settings that the folder's samples depend on, or compares them with those that the folder has.

    Raises `ConfigError` if they differ or the folder holds something else, and `DataError` if they cannot be read.
    """
    worker = config.worker
    settings = {
        **own,
        "data": dataclasses.asdict(config.data),
        "worker.actor.model": dataclasses.asdict(worker.actor.model),
        "worker.rollout": dataclasses.asdict(worker.rollout),
        "worker.reward": dataclasses.asdict(worker.reward),
        "trainer.seed": config.trainer.seed,
        "algorithm.correct_key": config.algorithm.correct_key,
        "algorithm.correct_threshold": config.algorithm.correct_threshold,
    }
    flat = json.loads(json.dumps(dict(leaves(settings)), default=str))
    path = folder / SETTINGS_FILE
    if (irregular := irregular_file(folder)) is not None:
        raise ForeignFileError(irregular, "is a link, a pipe or a device; give a new folder (--out)")
    if path.is_file():
        with read_whole(path):
            before: Tree = read_json(path, dict, within=folder)
        other = [key for key in sorted({*flat, *before}) if flat.get(key) != before.get(key)]
        if other:
            raise ConfigError(
                f"--out {folder} holds a measurement with other settings: {', '.join(other[:5])}; give the same settings "
                "to resume it, or a new folder"
            )
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--out {folder} does not hold a measurement; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(flat, indent=1) + "\n")


def read_whole(path: Path) -> AbstractContextManager[None]:
    """Returns a context for reading a file of the folder, which raises `DataError` if the file is damaged."""
    return damaged_as(path, "is damaged, and its measurement cannot go on; give a new folder (--out)")


def kept_rollouts(folder: Path, session: Session) -> Rollouts:
    """Returns the folder's rollouts; if there are none, samples and stores those of the first step.

    They include the rewards of greedy responses, which methods that are measured later may need. Raises `DataError` if
    the file is damaged, `EngineError` or `RewardError` if sampling or grading fails.
    """
    path = folder / _RESPONSES_FILE
    if not path.exists():
        asked = session.ask(0, with_baselines=True)
        assert asked.reward_baselines is not None
        rows: list[Tree] = [
            {
                "prompt_id": asked.problems[row // asked.group_size].prompt_id,
                "response": asked.responses[row],
                **dataclasses.asdict(generation),
                "scores": dict(asked.scores[row]),
                "correct": bool(asked.correct[row]),
                "baseline": float(asked.reward_baselines[row]),
            }
            for row, generation in enumerate(asked.generations)
        ]
        write_atomically(path, b"".join(map(encode_line, rows)).decode("utf-8"))
    problems = session.problems_of(0)
    with read_whole(path):
        rows = list(read_objects(path, within=folder))
        return Rollouts(
            step=0,
            problems=problems,
            prompts=[session.contexts.student(problem) for problem in problems],
            generations=[
                Generation(
                    response_ids=tuple(row["response_ids"]), log_probs=tuple(row["log_probs"]), finished=row["finished"]
                )
                for row in rows
            ],
            responses=[row["response"] for row in rows],
            scores=[row["scores"] for row in rows],
            correct=torch.tensor([row["correct"] for row in rows]),
            reward_baselines=torch.tensor([row["baseline"] for row in rows]),
        )


@pydantic_dataclass(frozen=True, kw_only=True)
class Continued:
    """The continuations of one prefix, as stored."""

    prefix: str  # its name
    length: int  # of the prefix
    right: Annotated[str, Field(pattern="^[01]+$")]  # the verdict on each continuation
    entropy: float  # mean of -log P of the first tokens in nats, an unbiased estimate of the next token's entropy
    num_tokens: int  # of all continuations


class Continuations:
    """The continuations of a measurement, `number` per prefix, stored in `folder`."""

    def __init__(self, folder: Path, session: Session, rollouts: Rollouts, *, number: int) -> None:
        self._path, self._session, self._rollouts, self._number = folder / CONTINUATIONS_FILE, session, rollouts, number
        with read_whole(self._path):
            rows = read_objects(self._path, within=folder) if self._path.exists() else ()
            self.done: dict[str, Continued] = {row["prefix"]: Continued(**row) for row in rows}

    def missing(self, prefixes: Sequence[Prefix]) -> list[Prefix]:
        """Returns the prefixes that have not been continued yet."""
        return [prefix for prefix in prefixes if prefix.name not in self.done]

    def sample(self, prefixes: Sequence[Prefix]) -> None:
        """Samples the missing continuations; raises `EngineError` or `RewardError` if sampling or grading fails."""
        missing = self.missing(prefixes)
        with (
            closing(LineFile(self._path)) as file,
            Progress("sampling continuations", len(missing) * self._number) as progress,
        ):
            for part in self._parts(missing):
                for continued in self._continue(part):
                    file.append(dataclasses.asdict(continued))
                    self.done[continued.prefix] = continued
                progress.update(len(part) * self._number)

    def _parts(self, prefixes: Sequence[Prefix]) -> list[list[Prefix]]:
        """Splits prefixes into parts of similar length that are sampled together.

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
        return parts

    def _continue(self, prefixes: Sequence[Prefix]) -> list[Continued]:
        session, problems, prompts = self._session, self._rollouts.problems, self._rollouts.prompts
        rollout = session.config.worker.rollout
        settings = training_settings(rollout, session.config.data)
        longest = settings.max_response_length
        shortest = min(len(prefix.tokens) for prefix in prefixes)
        settings = dataclasses.replace(settings, num_samples=self._number, max_response_length=longest - shortest)
        seeds = [sampling_seed(rollout.seed, _CONTINUATION_STEP, prefix.name) for prefix in prefixes]
        requests = [
            request(problems[prefix.problem], prompts[prefix.problem], seed, prefix.tokens)
            for prefix, seed in zip(prefixes, seeds, strict=True)
        ]
        sampled = session.backend.generate(requests, settings)
        # Cutting equals sampling with the prefix's own limit: the noise does not depend on the limit.
        whole = [
            [(prefix.problem, prefix.tokens + one.response_ids[: longest - len(prefix.tokens)]) for one in group]
            for prefix, group in zip(prefixes, sampled, strict=True)
        ]
        # Equal responses to a problem are graded once.
        distinct = list(dict.fromkeys(response for group in whole for response in group))
        correct = session.asker.verdicts([(problems[problem], tokens) for problem, tokens in distinct])
        verdicts = dict(zip(distinct, correct.tolist(), strict=True))
        return [
            Continued(
                prefix=prefix.name,
                length=len(prefix.tokens),
                right="".join("1" if verdicts[response] else "0" for response in responses),
                entropy=sum(-one.log_probs[0] for one in group) / len(group),
                num_tokens=sum(len(tokens) - len(prefix.tokens) for _, tokens in responses),
            )
            for prefix, group, responses in zip(prefixes, sampled, whole, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class Truth:
    """The truth about the N measured tokens, ordered by response; after its last token, V is a response's own verdict.

    The halves, (2, N), are from even and odd continuations, whose noise is independent; all else is (N,).
    """

    problem: NDArray[numpy.int64]  # number of the token's problem
    row: NDArray[numpy.int64]  # of its response among the rollouts
    token: NDArray[numpy.int64]  # its position in the response
    value: Numbers  # V before the token
    credit: Numbers  # A* of the token
    value_halves: Numbers
    credit_halves: Numbers
    entropy: Numbers  # in nats, of the distribution from which the token was sampled

    @cached_property
    def entries(self) -> dict[int, NDArray[numpy.int64]]:
        """The measured tokens of each response, as indices into the arrays."""
        return {row: numpy.flatnonzero(self.row == row) for row in numpy.unique(self.row).tolist()}


def assemble(rollouts: Rollouts, chosen: Mapping[int, Sequence[int]], continued: Mapping[str, Continued]) -> Truth:
    """Computes the truth about the chosen tokens from the verdicts on continuations."""
    rows, tokens = numpy.array([(row, token) for row, tokens in chosen.items() for token in tokens]).T

    def values(row: int, length: int) -> Numbers:
        """V before token `length`, and its two halves; after the last token the response's own verdict."""
        if length == len(rollouts.generations[row].response_ids):
            return numpy.full(3, float(rollouts.correct[row]))
        right = numpy.array(list(continued[prefix_of(rollouts, row, length).name].right), dtype=float)
        return numpy.array([right.mean(), right[0::2].mean(), right[1::2].mean()])

    before, after = (numpy.array([*map(values, rows, tokens + more)]).T for more in (0, 1))
    prefixes = [prefix_of(rollouts, row, token) for row, token in zip(rows, tokens, strict=True)]
    return Truth(
        problem=rows // rollouts.group_size,
        row=rows,
        token=tokens,
        value=before[0],
        credit=(after - before)[0],
        value_halves=before[1:],
        credit_halves=(after - before)[1:],
        entropy=numpy.array([continued[prefix.name].entropy for prefix in prefixes]),
    )
