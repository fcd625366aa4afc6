"""Turns a row of a trainer's file into a recorded response."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy

from cepo.errors import DataError
from cepo.files.trees import Fields, Tree, is_dict, is_list
from cepo.report.responses import RecordedResponse

PROMPT = ("prompt", "problem", "question", "input", "query")
RESPONSE = ("completion", "response", "output", "generation")
REWARD = ("reward", "score", "overall")
_TRUTH = ("ground_truth", "gts", "answer", "solution", "label")
_RIGHT = ("acc", "accuracy", "correct", "is_correct", "right")
_JUDGES_ANSWER = re.compile(r"(?:.*_)?(?:acc|accuracy|correct|correctness|right)(?:_.*)?")
"""The name of a reward function that says whether the answer is right, such as `accuracy_reward` of TRL."""
_GROUP = ("group_id", "prompt_id", "uid", "example_id", "group")
_LENGTH = ("num_tokens", "response_length", "completion_length")
_CHATML = re.compile(r"<\|im_(?:start|end)\|>")
_TURNS = re.compile(
    r"\A(?:system\n(?P<system>.*?)\n)?user\n(?P<user>(?:(?!\n(?:user|assistant)\n).)*)(?:\nassistant\n?(?:<think>\n?)?)?\Z",
    re.DOTALL,
)
_LIMITS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "context_length")
"""What ends a trace of prime-rl, if it is a limit."""
_ENVIRONMENT = "Environment:"
"""With which the turns of NeMo-RL's built-in environments begin."""
_VERLS_KEY = re.compile(r"(?P<prompt>(?P<padding>pad)?[0-9a-f-]{32,36})_\d+_\d+\Z")
"""The `uid` of a row of verl: prompt, rollout, and output; `pad` if the row fills a batch and is no response."""


def response_of(row: Fields, step: int, *, scores: Fields | None = None) -> RecordedResponse | None:
    """Returns the response of a row with one of the known names for each field; None if it has no reward or no response.

    `scores` are those of several reward functions, None or NaN where one gave none; the reward is their sum.
    """
    key = _VERLS_KEY.match(str(row.get("uid")))
    parts = {name: number for name, score in (scores or {}).items() if (number := _number(score)) is not None}
    reward = _number(_first(row, REWARD)) if scores is None else math.fsum(parts.values()) if parts else None
    said = _first(row, RESPONSE)
    if reward is None or said is None or (key is not None and key["padding"]):
        return None
    text = text_of(said)
    right = _number(_first(row, _RIGHT)) if scores is None else _score_of_answer(parts)
    length = _number(_first(row, _LENGTH))
    truncated = row.get("is_truncated", row.get("truncated"))
    return RecordedResponse(
        step=int(_first(row, ("step",), step)),
        group=str(_first(row, _GROUP, "")) if key is None else key["prompt"],
        prompt=question_of(text_of(_first(row, PROMPT))),
        response=text,
        reward=reward,
        length=len(text) if length is None else int(length),
        ground_truth=_truth_of(_first(row, _TRUTH)),
        right=None if right is None else right >= 0.5,
        finished=not truncated if isinstance(truncated, bool) else None,
        parts=parts,
        images=_images_of(row),
    )


def nemo_response(row: Fields, step: int) -> RecordedResponse | None:
    """Returns the response of a row that NeMo-RL wrote: the texts of its turns, and padded lists of its tokens.

    Turns alternate from the first one of the policy on. Their roles are not recorded, so its mask says which they are. After
    a response that fills the window, the environment's turn has no tokens. With dynamic sampling, `rewards` are those of
    all sampled responses, in another order than the rows. Returns None for rows without rewards, which distillation
    writes, and for rows without texts, which NeMo Gym writes.
    """
    turns = [text_of(turn) for turn in row.get("content") or ()]
    reward = _number(row.get("filtered_rewards", row.get("rewards")))
    if reward is None or not any(turns):
        return None
    marks = numpy.asarray(row.get("token_loss_mask", ()), dtype=bool)[
        : int(row["input_lengths"])
    ]  # the policy's tokens
    first = 1
    if len(marks):  # early releases write none
        starts = int(marks[0]) + int((marks[1:] & ~marks[:-1]).sum())
        ends_with_policy = bool(marks[-1]) and not turns[-1].startswith(_ENVIRONMENT)
        first = max(1, len(turns) - (2 * starts - ends_with_policy))
    said = turns[first:]
    if len(said) > 1 and said[-1].startswith(_ENVIRONMENT):
        said = said[:-1]
    response = "\n".join(said)
    sampled, trained = (
        numpy.asarray(row[name], dtype=float)[: len(marks)][marks] for name in ("generation_logprobs", "prev_logprobs")
    )
    return RecordedResponse(
        step=step,
        group="",
        prompt=question_of("\n".join(turns[:first])),
        response=response,
        reward=reward,
        length=int(marks.sum()) if len(marks) else len(response),
        gap=_mean(numpy.abs(sampled - trained)),
        surprise=_mean(-sampled),
    )


def traces_of(row: Fields) -> Sequence[Fields]:
    """Returns the traces of an episode that prime-rl wrote, but for those of frozen agents; of any other row itself."""
    if "traces" not in row:
        return [row]
    group = row.get("group") or {}
    traces: list[Fields] = []
    for trace in row["traces"]:
        if trace.get("agent", {}).get("trainable", True):
            traces.append({"group_id": group.get("id"), **trace})
    return traces or [{"nodes": []}]


def prime_response(row: Fields, step: int) -> RecordedResponse | None:
    """Returns the response of a trace that prime-rl wrote, of its last branch; None if it failed, or has no response.

    A reward is a number, or since July 2026 a score with its weight.
    """
    nodes: Sequence[Fields] = row["nodes"]
    if row.get("errors") or not nodes:
        return None
    branch: list[Fields] = []
    place: int | None = len(nodes) - 1
    while place is not None and len(branch) < len(nodes):
        branch.append(nodes[place])
        place = nodes[place].get("parent")
    branch.reverse()
    first = next((number for number, node in enumerate(branch) if node["sampled"]), None)
    if first is None:
        return None
    messages = [node["message"] for node in branch]
    scores: dict[str, float] = {}
    weighted: list[float] = []
    for name, reward in (row.get("rewards") or {}).items():
        fields: Fields = reward if is_dict(reward) else {"score": reward}
        score = _number(fields.get("score"))
        if score is not None:
            scores[name] = score
            weighted.append(score * fields.get("weight", 1.0))
    task = row.get("task")
    data = task.get("data") if is_dict(task) else None
    num_tokens = sum(sum(node.get("mask") or ()) for node in branch)
    log_probs = [number for node in branch for number in node.get("logprobs") or ()]
    flat: Tree = {
        **{name: row[name] for name in (*_GROUP, "is_truncated") if name in row},
        "prompt": messages[:first],
        "response": messages[first:],
        "reward": _first(row, ("reward",), math.fsum(weighted) if weighted else None),
        "acc": _score_of_answer(scores),
        "num_tokens": num_tokens or None,
        "answer": data.get("answer") if is_dict(data) else None,
    }
    if "calls" in row:
        flat["is_truncated"] = _is_truncated(row)
    response = response_of(flat, step)
    return None if response is None else replace(response, surprise=_mean(-numpy.asarray(log_probs, dtype=float)))


def _is_truncated(trace: Fields) -> bool:
    """Returns whether a limit ended a trace of prime-rl, or its last response."""
    if trace.get("stop_condition") in _LIMITS:
        return True
    reasons = [call.get("finish_reason") for call in trace["calls"] if not call.get("error")]
    return reasons[-1:] == ["length"]


def text_of(value: object) -> str:
    """Returns a text, or the texts of a conversation or a turn's parts: of several turns each after the name of its role."""
    if is_dict(value):
        said = text_of(value.get("content") or value.get("text"))
        thought = value.get("reasoning_content")
        return f"{thought}\n{said}" if thought else said
    if not is_list(value):
        return "" if value is None else str(value)
    turns = [part for part in value if is_dict(part) and "role" in part]
    if len(turns) > 1:
        return "\n".join(f"{turn.get('role')}\n{text_of(turn)}" for turn in turns)
    return "".join(text_of(part) for part in value if isinstance(part, dict | str))


def question_of(prompt: str) -> str:
    """Returns the user's text of a prompt of one turn, as `text_of` or a chat template of the ChatML family wrote it.

    Returns the whole prompt if it has other turns.
    """
    turns = _TURNS.match(_CHATML.sub("", prompt).strip() + "\n")
    return (prompt if turns is None else turns["user"]).strip()


def easyr1_rows(text: str) -> Iterator[Tree]:
    """Yields the rows of EasyR1's `generations.log`, with the number of their validation as step.

    Each validation logs the same problems in the same order; several of them may have the same text and other images.
    """
    entry = re.compile(
        r"^\[prompt\] (?P<prompt>.*?)\n\[output\] (?P<output>.*?)"
        r"\n\[ground_truth\] (?P<ground_truth>.*?)\n\[score\] (?P<score>\S+)$",
        re.DOTALL | re.MULTILINE,
    )
    rows: list[Tree] = [match.groupdict() for match in entry.finditer(text)]
    problems = [(row["prompt"], row["ground_truth"]) for row in rows]
    period = next((size for size in range(1, len(rows)) if problems[size:] == problems[:-size]), len(rows))
    for number, row in enumerate(rows):
        yield row | {"step": 1 + number // period, "score": float(row["score"])}


def require_names(row: Fields, place: str) -> None:
    """Raises `DataError` if a row lacks a prompt, a response or a reward."""
    for names in (PROMPT, RESPONSE, REWARD):
        if not any(name in row for name in names):
            raise DataError(f"{place} has no {' or '.join(names)}; it has {', '.join(list(row)[:12])}")


def _first(row: Fields, names: Sequence[str], default: Any = None) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), default)


def _score_of_answer(scores: Mapping[str, float]) -> float | None:
    """Returns what the first reward function gave that judges answers; None without one."""
    return next((score for name, score in scores.items() if _JUDGES_ANSWER.fullmatch(name)), None)


def _number(value: object) -> float | None:
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def _truth_of(value: object) -> str:
    if is_dict(value):
        value = value.get("ground_truth", value)
    return "" if value is None else str(value)


def _images_of(row: Fields) -> Sequence[str]:
    images = row.get("images") or row.get("image") or ()
    if isinstance(images, str):
        images = [images]
    return [image for image in images if isinstance(image, str)]


def _mean(values: numpy.ndarray) -> float | None:
    return float(values.mean()) if len(values) and numpy.isfinite(values).all() else None
