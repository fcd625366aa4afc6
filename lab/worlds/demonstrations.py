"""What the worlds' weights learn from: prompts, and the shapes world's noisy solutions, some with a right or wrong hint.

The noise makes the model imperfect: a demonstration may misread the image or compute a wrong result, and each family
has a systematic mistake with its own rate. The hints teach the model what `Here is a sample answer` means. They mostly
state the demonstration's own answer, so a correct hint makes the correct reading of the image more likely and a wrong
hint makes it less likely.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cepo.microgeo.problems import FAMILIES, Numbers, ToyProblem

FORMAT_PROMPT = "{{ content | trim }} Answer in \\boxed{}."
TEACHER_PROMPT = "{{ prompt }}\nHere is a sample answer: {{ reference }}"
"""Copies of `configs/format_prompt/microgeo.jinja` and `configs/teacher/user_suffix.jinja`."""


def user_text(question: str, reference: str | None = None) -> str:
    """Returns the text of the user turn; with `reference`, that of the teacher's prompt."""
    text = FORMAT_PROMPT.replace("{{ content | trim }}", question.strip())
    if reference is None:
        return text
    return TEACHER_PROMPT.replace("{{ prompt }}", text).replace("{{ reference }}", reference)


def user_messages(question: str, reference: str | None = None) -> list[dict[str, Any]]:
    """Returns a user turn with the image and then the text, in the format of chat templates."""
    content = [{"type": "image"}, {"type": "text", "text": user_text(question, reference)}]
    return [{"role": "user", "content": content}]


WARM_START = "warmstart"
"""The stream of problems that are demonstrated."""
Slip = Callable[[int], int]
"""Is applied to every computed result."""
Steps = list[tuple[str, int]]
"""The text up to a result, and the result. The last one is the answer."""


def no_slip(result: int) -> int:
    return result


def solve(problem: ToyProblem, *, seen: str | None = None, misconceived: bool = False, slip: Slip = no_slip) -> Steps:
    """Returns the steps for a reader who sees `seen`, by default what the image shows.

    `misconceived` makes the family's typical systematic mistake.
    """
    return _SOLVE[problem.family](problem.seen if seen is None else seen, problem.numbers, misconceived, slip)


def _perimeter(seen: str, numbers: Numbers, misconceived: bool, slip: Slip) -> Steps:
    count, side = int(seen), numbers[0]
    if misconceived:
        return [(f"{count} sides. {count}+{side}=", slip(count + side))]
    return [(f"{count} sides. {count}*{side}=", slip(count * side))]


def _angle(seen: str, numbers: Numbers, misconceived: bool, slip: Slip) -> Steps:
    count, (first, second) = int(seen), numbers
    total = 180 * (count - 1 if misconceived else count - 2)
    known = slip(first + second)
    rest = slip(total - known)
    steps = [(f"{count} corners. {first}+{second}=", known), (f"{total}-{known}=", rest)]
    if count > 3:
        steps.append((f"{rest}/{count - 2}=", slip(rest // (count - 2))))
    return steps


def _ticks(seen: str, numbers: Numbers, misconceived: bool, slip: Slip) -> Steps:
    count, part = int(seen), numbers[0]
    factor = count + 1 if misconceived else count
    return [(f"{count} parts. {factor}*{part}=", slip(factor * part))]


def _fence(seen: str, numbers: Numbers, misconceived: bool, slip: Slip) -> Steps:
    width, height = numbers
    single, double = (width, height) if seen == "width" else (height, width)
    if misconceived:
        return [(f"{seen} open. {single}+{double}=", slip(single + double))]
    doubled = slip(2 * double)
    return [(f"{seen} open. 2*{double}=", doubled), (f"{doubled}+{single}=", slip(doubled + single))]


_SOLVE = {"perimeter": _perimeter, "angle": _angle, "ticks": _ticks, "fence": _fence}


@dataclass(frozen=True)
class NoiseRates:
    """Probabilities of the mistakes per demonstration, or of `slip` per computed result.

    Hinted demonstrations misread more often, which teaches the model that a hint says what was seen.
    """

    misread: float = 0.12
    misread_when_hinted: float = 0.35
    slip: float = 0.05
    misconception: dict[str, float] = field(
        default_factory=lambda: {"perimeter": 0.10, "angle": 0.30, "ticks": 0.36, "fence": 0.48}
    )
    hinted: float = 0.40
    hint_bends_the_result: float = 0.08
    hint_is_ignored: float = 0.08


@dataclass(frozen=True)
class Demonstration:
    """The response that the model learns for a problem, and the hint that it is shown, if any."""

    problem: ToyProblem
    response: str
    hint: str | None


def demonstrate(problem: ToyProblem, rates: NoiseRates, *, seed: int) -> Demonstration:
    """Returns a noisy solution of `problem`, a pure function of the problem, the rates and the seed."""
    rng = random.Random(f"demonstration/{seed}/{problem.id}")
    family = FAMILIES[problem.family]
    seen = problem.seen
    hinted = rng.random() < rates.hinted
    if rng.random() < (rates.misread_when_hinted if hinted else rates.misread):
        seen = rng.choice([value for value in family.seen_values if value != problem.seen])
    misconceived = rng.random() < rates.misconception[problem.family]
    steps = solve(problem, seen=seen, misconceived=misconceived, slip=_slips(rng, rates.slip))
    if not hinted:
        return Demonstration(problem, response_text(steps), None)
    kind = rng.random()
    own = steps[-1][1]
    if kind < rates.hint_bends_the_result + rates.hint_is_ignored:
        hint = _other_number(rng, own)
        if kind < rates.hint_bends_the_result:
            steps = [*steps[:-1], (steps[-1][0], hint)]
        return Demonstration(problem, response_text(steps), str(hint))
    return Demonstration(problem, response_text(steps), str(own))


def _slips(rng: random.Random, probability: float) -> Slip:
    def slip(result: int) -> int:
        return near_number(rng, result) if rng.random() < probability else result

    return slip


def near_number(rng: random.Random, number: int) -> int:
    return rng.choice(
        [near for near in (number - 10, number - 2, number - 1, number + 1, number + 2, number + 10) if near > 0]
    )


def _other_number(rng: random.Random, number: int) -> int:
    return rng.choice([other for other in range(max(2, number // 2), 2 * number + 10) if other != number])


def response_text(steps: Steps) -> str:
    """Returns the reasoning in words, with the last result in the box."""
    reasoning = " ".join(f"{text}{result}." for text, result in steps)
    return f"{reasoning} \\boxed{{{steps[-1][1]}}}"


def right_response(problem: ToyProblem) -> str:
    """Returns the solution without mistakes."""
    return response_text(solve(problem))
