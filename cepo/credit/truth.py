"""Measures the truth about tokens: `V_t`, the chance of a right continuation, and `A*_t = V_{t+1} - V_t`.

Rollouts and the continuations of their prefixes are stored in the measurement's folder, from which it resumes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
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

from cepo.algorithms import statistics
from cepo.config import RunConfig
from cepo.credit.resources import Session
from cepo.errors import ConfigError, DataError, ForeignFileError
from cepo.files.safe_files import damaged_as, irregular_file, read_json, read_objects
from cepo.files.trees import Fields, Tree, leaves
from cepo.rollout.generator import Generation, GenerationRequest, sampling_seed
from cepo.run_folder.writing import LineFile, encode_line, write_atomically
from cepo.terminal.progress import Progress
from cepo.trainer.checkpoints import written_files
from cepo.trainer.rollouts import Rollouts
from cepo.trainer.sampling import request, training_settings

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
    live = statistics.live_rows(rollouts.rewards, rollouts.group_ids).nonzero().flatten().tolist()
    if not live:
        raise DataError(
            f"all {len(rollouts.problems)} groups of {rollouts.group_size} responses have equal rewards, so no token made a "
            "difference; give other data, another checkpoint, or more responses per problem (worker.rollout.n)"
        )
    permuted_rows = numpy.random.default_rng(seed).permutation(live).tolist()
    chosen: dict[int, list[int]] = {}
    for row in sorted(permuted_rows[:num_responses]):
        length = len(rollouts.generations[row].response_ids)
        permuted_tokens = numpy.random.default_rng([seed, row]).permutation(length).tolist()
        chosen[row] = sorted(permuted_tokens[:num_tokens])
    return chosen


def prefix_of(rollouts: Rollouts, row: int, length: int) -> Prefix:
    """Returns the first `length` tokens of the response in `row`."""
    problem = row // rollouts.group_size
    tokens = tuple(rollouts.generations[row].response_ids[:length].tolist())
    return Prefix(problem=problem, prompt_id=rollouts.problems[problem].prompt_id, tokens=tokens)


def needed_prefixes(rollouts: Rollouts, chosen: Mapping[int, Sequence[int]]) -> list[Prefix]:
    """Returns the distinct prefixes before and after the chosen tokens, the shortest first, without whole responses."""
    prefixes: dict[str, Prefix] = {}
    for row, tokens in chosen.items():
        lengths: set[int] = set()
        for token in tokens:
            lengths.update((token, token + 1))
        lengths.discard(len(rollouts.generations[row].response_ids))  # its verdict is the response's own
        for length in sorted(lengths):
            prefix = prefix_of(rollouts, row, length)
            prefixes[prefix.name] = prefix
    return sorted(prefixes.values(), key=lambda prefix: (len(prefix.tokens), prefix.problem, prefix.tokens))


def require_measurement_folder(folder: Path) -> None:
    """Raises `ConfigError` if a folder for results holds something else than a measurement."""
    if folder.is_file():
        raise ConfigError(f"--out {folder} is a file; give a folder")
    if folder.exists() and not (folder / SETTINGS_FILE).exists() and any(folder.iterdir()):
        raise ConfigError(f"--out {folder} does not hold a measurement; give a new folder")


def claim_folder(folder: Path, effort: Fields, config: RunConfig, *, actor: Path | None = None) -> None:
    """Writes the settings that the folder's samples depend on, or compares them with those that the folder has.

    Those of a checkpoint's folder `actor` depend on its files, since a later run writes others in the same place.

    Raises `ConfigError` if they differ or the folder holds something else, and `DataError` if they cannot be read.
    """
    worker = config.worker
    settings = {
        **effort,
        "checkpoint_files": {} if actor is None else written_files(actor),
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
    irregular = irregular_file(folder)
    if irregular is not None:
        raise ForeignFileError(irregular, "is a link, a pipe or a device; give a new folder (--out)")
    if path.is_file():
        with read_whole(path):
            stored: Tree = read_json(path, dict, within=folder)
        differing = [key for key in sorted({*flat, *stored}) if flat.get(key) != stored.get(key)]
        if differing:
            raise ConfigError(
                f"--out {folder} holds a measurement with other settings: {', '.join(differing[:5])}; give the same "
                "settings to resume it, or a new folder"
            )
        return
    require_measurement_folder(folder)
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
        _write_rollouts(path, session.sample(0, with_baselines=True))
    problems = session.problems_of(0)
    with read_whole(path):
        rows = list(read_objects(path, within=folder))
        recorded = [row["prompt_id"] for row in rows]
        expected = [problem.prompt_id for problem in problems for _ in range(session.config.worker.rollout.n)]
        if recorded != expected:
            raise DataError(
                f"{path} has not the responses to the problems that are measured; give a new folder (--out)"
            )
        generations: list[Generation] = []
        for row in rows:
            generations.append(Generation.of(row["response_ids"], row["log_probs"], finished=row["finished"]))
        return Rollouts(
            step=0,
            problems=problems,
            prompts=[session.contexts.student(problem) for problem in problems],
            generations=generations,
            responses=[row["response"] for row in rows],
            scores=[row["scores"] for row in rows],
            correct=torch.tensor([row["correct"] for row in rows]),
            reward_baselines=torch.tensor([row["baseline"] for row in rows]),
        )


def _write_rollouts(path: Path, rollouts: Rollouts) -> None:
    assert rollouts.reward_baselines is not None, "a measurement samples its rollouts with baselines"
    rows: list[Tree] = []
    for row, generation in enumerate(rollouts.generations):
        problem = rollouts.problems[row // rollouts.group_size]
        rows.append(
            {
                "prompt_id": problem.prompt_id,
                "response": rollouts.responses[row],
                "response_ids": generation.response_ids.tolist(),
                "log_probs": generation.log_probs.tolist(),
                "finished": generation.finished,
                "scores": dict(rollouts.scores[row]),
                "correct": bool(rollouts.correct[row]),
                "baseline": float(rollouts.reward_baselines[row]),
            }
        )
    write_atomically(path, b"".join(map(encode_line, rows)).decode("utf-8"))


_Response = tuple[int, tuple[int, ...]]
"""The number of a problem among the rollouts', and the tokens of a response to it."""


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
        self._path = folder / CONTINUATIONS_FILE
        self._session = session
        self._rollouts = rollouts
        self._number = number
        self.done: dict[str, Continued] = {}
        with read_whole(self._path):
            if self._path.exists():
                for row in read_objects(self._path, within=folder):
                    self.done[row["prefix"]] = Continued(**row)

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
        longest_prompt = self._session.config.data.max_prompt_length
        parts: list[list[Prefix]] = []
        for prefix in sorted(prefixes, key=lambda prefix: len(prefix.tokens)):
            if not parts or not self._fits(prefix, parts[-1], longest_prompt):
                parts.append([])
            parts[-1].append(prefix)
        return parts

    def _fits(self, prefix: Prefix, part: Sequence[Prefix], longest_prompt: int) -> bool:
        prompt = self._rollouts.prompts[prefix.problem]
        num_tokens_more = len(prefix.tokens) - len(part[0].tokens)
        return len(part) < _PREFIXES_AT_ONCE and num_tokens_more <= longest_prompt - len(prompt.token_ids)

    def _continue(self, prefixes: Sequence[Prefix]) -> list[Continued]:
        rollouts = self._rollouts
        groups = self._sampled(prefixes)
        longest = self._session.config.data.max_response_length
        responses: list[list[_Response]] = []  # of each prefix
        for prefix, group in zip(prefixes, groups, strict=True):
            # Cutting equals sampling with the prefix's own limit: the noise does not depend on the limit.
            limit = longest - len(prefix.tokens)
            whole_responses = [(*prefix.tokens, *sample.response_ids[:limit].tolist()) for sample in group]
            responses.append([(prefix.problem, tokens) for tokens in whole_responses])
        # Equal responses to a problem are graded once.
        distinct = list(dict.fromkeys(itertools.chain.from_iterable(responses)))
        correct = self._session.sampler.verdicts([(rollouts.problems[problem], tokens) for problem, tokens in distinct])
        is_right = dict(zip(distinct, correct.tolist(), strict=True))
        continuations: list[Continued] = []
        for prefix, group, whole_responses in zip(prefixes, groups, responses, strict=True):
            verdicts = ["1" if is_right[response] else "0" for response in whole_responses]
            continuations.append(
                Continued(
                    prefix=prefix.name,
                    length=len(prefix.tokens),
                    right="".join(verdicts),
                    entropy=sum(-float(generation.log_probs[0]) for generation in group) / len(group),
                    num_tokens=sum(len(tokens) - len(prefix.tokens) for _, tokens in whole_responses),
                )
            )
        return continuations

    def _sampled(self, prefixes: Sequence[Prefix]) -> list[list[Generation]]:
        """Samples each prefix's continuations, all up to the limit of the shortest prefix."""
        config = self._session.config
        shortest = min(len(prefix.tokens) for prefix in prefixes)
        settings = training_settings(config.worker.rollout, config.data.max_response_length)
        settings = dataclasses.replace(
            settings,
            num_samples=self._number,
            max_response_length=settings.max_response_length - shortest,
        )
        requests: list[GenerationRequest] = []
        for prefix in prefixes:
            problem = self._rollouts.problems[prefix.problem]
            prompt = self._rollouts.prompts[prefix.problem]
            seed = sampling_seed(config.worker.rollout.seed, _CONTINUATION_STEP, prefix.name)
            requests.append(request(problem, prompt, seed, prefix.tokens))
        return self._session.backend.generate(requests, settings)


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

    def values(row: int, length: int) -> Numbers:
        """V before token `length`, and its two halves; after the last token the response's own verdict."""
        if length == len(rollouts.generations[row].response_ids):
            return numpy.full(3, float(rollouts.correct[row]))
        verdicts = continued[prefix_of(rollouts, row, length).name].right
        right = numpy.array(list(verdicts), dtype=float)
        return numpy.array([right.mean(), right[0::2].mean(), right[1::2].mean()])

    measured = [(row, token) for row, tokens in chosen.items() for token in tokens]
    rows, tokens = numpy.array(measured).T
    value = numpy.array([values(row, token) for row, token in measured]).T  # (3, N): V and its halves
    credit = numpy.array([values(row, token + 1) for row, token in measured]).T - value
    entropies = [continued[prefix_of(rollouts, row, token).name].entropy for row, token in measured]
    return Truth(
        problem=rows // rollouts.group_size,
        row=rows,
        token=tokens,
        value=value[0],
        credit=credit[0],
        value_halves=value[1:],
        credit_halves=credit[1:],
        entropy=numpy.array(entropies),
    )
