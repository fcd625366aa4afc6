"""Turns a row of each benchmark, as its authors publish it, into a problem with an answer to grade.

A converter returns what differs from the defaults of `cepo.evaluation.benchmarks.converted`:

- `problem`, the text; and if images stand at places in it, marked there, `images`;
- `answer`, and for `cepo.rewards.benchmark` also `answer_kind`, `choices`, `tolerance`, `decimals`, `alternatives`;
- `cluster`: rows with the same one are dependent;
- `categories`: values by the name of the category, by which accuracies are also given.

The columns are those of the data sets that the benchmarks' authors and lmms-eval publish (lmms-eval 75571cf,
lmms_eval/tasks/*; github.com/lupantech/MathVista, MMMU-Benchmark/MMMU, We-Math/We-Math, mathllm/MATH-V,
DynaMath/DynaMath, Yijia-Xiao/LogicVista).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, cast

from cepo.answers import LETTERS, chosen, kind_of
from cepo.data.json_text import read_literal
from cepo.data.row_parser import cell_text
from cepo.errors import DataError
from cepo.files.trees import Fields, Tree, is_list, is_mapping
from cepo.models.text_codec import IMAGE_MARK
from cepo.rewards.benchmark import options_in_text

_WEMATH_OPTION = re.compile(r"(?:^|;)\s*([A-J])\.\s*")
_NUMBERED_IMAGE = re.compile(r"<image (\d)>")
_MMMU_ID = re.compile(r"(?:dev|validation|test)_(?P<subject>.+)_\d+")
_DECIMALS = re.compile(r"\d{1,3}(?:\.0*)?", re.ASCII)
_MOST_DECIMALS = 15
_MOST_IMAGES = 7

_WEMATH_STEPS = {"2steps": 2, "3steps": 3}
"""The number of steps of a problem that needs several, by the beginning of its `key`."""

DISCIPLINES = {
    "Art and Design": ("Art", "Art_Theory", "Design", "Music"),
    "Business": ("Accounting", "Economics", "Finance", "Manage", "Marketing"),
    "Science": ("Biology", "Chemistry", "Geography", "Math", "Physics"),
    "Health and Medicine": (
        "Basic_Medical_Science",
        "Clinical_Medicine",
        "Diagnostics_and_Laboratory_Medicine",
        "Pharmacy",
        "Public_Health",
    ),
    "Humanities and Social Science": ("History", "Literature", "Psychology", "Sociology"),
    "Tech and Engineering": (
        "Agriculture",
        "Architecture_and_Engineering",
        "Computer_Science",
        "Electronics",
        "Energy_and_Power",
        "Materials",
        "Mechanical_Engineering",
    ),
}
"""MMMU's subjects by discipline, from table 2 of its paper (arXiv 2311.16502)."""


def dynamath(row: Fields) -> Tree:
    answer_type = text(row, "answer_type")
    question = text(row, "question")
    kind = {"float": "numeric", "multiple choice": "choice"}.get(answer_type, "text")
    options = options_in_text(question) if kind == "choice" else []
    answer = text(row, "ground_truth")
    if kind == "choice" and not chosen(answer, options):
        kind = "text"
    return {
        "problem": question,
        "answer": answer,
        "answer_kind": kind,
        "choices": options,
        "tolerance": 1e-3,
        "cluster": text(row, "id"),
        "categories": _categories(row, "subject", "knowledge_level", "level"),
    }


def logicvista(row: Fields) -> Tree:
    question = text(row, "question")
    answer = text(row, "answer")
    return {
        "problem": question,
        "answer": answer,
        "answer_kind": kind_of(answer),
        "choices": options_in_text(question),
        "categories": _categories(row, "skill", "broad_capability", "specific_capability"),
    }


def mathvision(row: Fields) -> Tree:
    options = listed(row, "options")
    answer = text(row, "answer")
    are_letters = options == list(LETTERS[: len(options)])
    texts = [""] * len(options) if are_letters else options
    return {
        "problem": text(row, "question") + options_below(options),
        "answer": answer,
        "answer_kind": "choice" if options else kind_of(answer),
        "choices": _choices(answer, texts) if options else [],
        "tolerance": 5e-3,
        "categories": _categories(row, "subject", "level"),
    }


def wemath(row: Fields) -> Tree:
    written_options = text(row, "option")
    answer = text(row, "answer")
    key = text(row, "key")
    # The text before the first letter, then letters and their options in turn.
    _, *letters_and_options = _WEMATH_OPTION.split(written_options)
    letters = "".join(letters_and_options[::2])
    options = [option.strip() for option in letters_and_options[1::2]]
    choices = options_below(options)
    if not options or letters != LETTERS[: len(options)]:  # as in 11 of the 1,740 rows
        options = []
        choices = f"\nChoices: {written_options}\nAnswer with the letter of the right choice."
    size, _, step = key.partition("_")
    if size not in _WEMATH_STEPS or not step:
        raise DataError(f"key is {key!r}; accepted: 2steps_1, 2steps_2, 2steps_multi, 3steps_1 and so on")
    steps = _WEMATH_STEPS[size] if step == "multi" else 1
    return {
        "problem": text(row, "question") + choices,
        "answer": answer,
        "answer_kind": "choice",
        "choices": _choices(answer, options),
        "cluster": text(row, "ID"),
        "categories": {"steps": [f"{steps}-step"], **_categories(row, "knowledge concept")},
    }


def mmmu(row: Fields) -> Tree:
    answer = text(row, "answer")
    is_choice = text(row, "question_type") == "multiple-choice"
    options = listed(row, "options") if is_choice else []
    problem, images = with_images_in_place(text(row, "question") + options_below(options), row)
    choices = [_NUMBERED_IMAGE.sub("", option) for option in options]
    named = _MMMU_ID.fullmatch(optional_text(row, "id"))
    subject = named["subject"] if named else optional_text(row, "subject")
    usual: Tree = {
        "problem": problem,
        "images": images,
        "categories": {
            **_disciplines(subject),
            **_categories(row, "subfield", "topic_difficulty"),
        },
    }
    if is_choice:
        return {**usual, "answer": answer, "answer_kind": "choice", "choices": _choices(answer, choices)}
    written_answers = as_list(answer) if answer.startswith("[") else []
    first_answer, *alternatives = written_answers or [answer]
    kind = kind_of(first_answer)
    return {
        **usual,
        "answer": first_answer,
        "alternatives": alternatives,
        "answer_kind": "text" if kind == "choice" else kind,
    }


def mathvista(row: Fields) -> Tree:
    options = listed(row, "choices")
    answer = text(row, "answer")
    question_type = text(row, "question_type")
    answer_type = text(row, "answer_type")
    question = text(row, "question")
    unit = optional_text(row, "unit")
    if unit:
        question += f" (Unit: {unit})"
    usual: Tree = {
        "categories": {
            **_categories(row, "question_type", "answer_type"),
            **_categories(_metadata(row), "task", "category", "context", "grade", "skills"),
        }
    }
    if question_type == "multi_choice":
        if answer not in options:
            raise DataError(f"the answer {answer!r} is none of the choices {options}")
        usual |= {"answer": LETTERS[options.index(answer)], "answer_kind": "choice", "choices": options}
        return {**usual, "problem": question + options_below(options)}
    decimals = whole_number(row, "precision") if answer_type == "float" else None
    unit_of_decimals = "decimal" if decimals == 1 else "decimals"
    forms = {
        "integer": "an integer",
        "float": f"a number with {decimals} {unit_of_decimals}",
        "list": "a list, such as [1, 2, 3]",
    }
    if answer_type not in forms:
        raise DataError(f"answer_type is {answer_type!r} in a free-form row; accepted: {', '.join(forms)}")
    return {
        **usual,
        "problem": f"{question}\nGive the answer as {forms[answer_type]}.",
        "answer": answer,
        "answer_kind": "judged" if answer_type == "list" else "numeric",
        "decimals": decimals,
    }


def _metadata(row: Fields) -> Fields:
    metadata = row.get("metadata")
    return metadata if is_mapping(metadata) else {}


def options_below(options: Sequence[str]) -> str:
    """Lists the options below the question and asks for a letter; empty without options."""
    if not options:
        return ""
    lines: list[str] = []
    for letter, option in zip(LETTERS, options, strict=False):
        lines.append(letter if letter == option else f"{letter}. {option}")
    return "\nChoices:\n" + "\n".join(lines) + "\nAnswer with the letter of the right choice."


def with_images_in_place(problem: str, row: Fields) -> tuple[str, list[Any]]:
    """Returns MMMU's text with images at their first mention or, without one, at the start; and the images in order."""
    unplaced: dict[str, Any] = {}  # images by their numbers
    for number in range(1, _MOST_IMAGES + 1):
        image = row.get(f"image_{number}")
        if image is not None:
            unplaced[str(number)] = image
    placed: list[Any] = []

    def place(match: re.Match[str]) -> str:
        number = match[1]
        if number not in unplaced:
            return f"image {number}"
        placed.append(unplaced.pop(number))
        return IMAGE_MARK

    problem = _NUMBERED_IMAGE.sub(place, problem)
    return IMAGE_MARK * len(unplaced) + problem, [*unplaced.values(), *placed]


def text(row: Fields, column: str) -> str:
    """Returns a cell as text; raises `DataError` if it is missing, empty, or neither text nor a number."""
    cell = optional_text(row, column)
    if not cell:
        raise DataError(f"column '{column}' is empty")
    return cell


def optional_text(row: Fields, column: str) -> str:
    """Returns a cell as text, empty without one; raises `DataError` if it is neither text nor a number."""
    value = row.get(column)
    if isinstance(value, float) and math.isnan(value):  # an empty cell of a column of numbers
        return ""
    if value is not None and not isinstance(value, str | int | float):
        raise DataError(f"column '{column}' holds a {type(value).__name__}; accepted: text or a number")
    return cell_text(value, column).strip()


def listed(row: Fields, column: str) -> list[str]:
    """Returns a cell that holds a list, or a list written as text, as texts; empty for no cell."""
    value = row.get(column)
    if value is None or value == "":
        return []
    values = as_list(value) if isinstance(value, str) else value
    if not is_list(values) and not isinstance(values, tuple):
        raise DataError(f"column '{column}' holds {str(value)[:100]!r}; accepted: a list")
    return [cell_text(entry, column).strip() for entry in cast("Sequence[object]", values)]


def as_list(written: str) -> list[str]:
    """Returns the list that a text spells in Python or JSON; raises `DataError` if it spells none."""
    try:
        values = read_literal(written)
    except DataError:
        values = None
    if not is_list(values):
        raise DataError(f"{written[:100]!r} is no list")
    return [cell_text(value, "options") for value in values]


def whole_number(row: Fields, column: str) -> int:
    """Returns a cell with a number of decimals; raises `DataError` if it is none from 0 to 15."""
    written = text(row, column)
    if not _DECIMALS.fullmatch(written) or int(float(written)) > _MOST_DECIMALS:
        raise DataError(f"column '{column}' is {written!r}; accepted: a whole number up to {_MOST_DECIMALS}")
    return int(float(written))


def _choices(answer: str, options: Sequence[str]) -> list[str]:
    """Returns the options if the right answer names one of them; none if it is another letter, which a few rows have.

    Raises `DataError` if the answer is no letter, as in splits whose answers are not public.
    """
    if chosen(answer, options):
        return [*options]
    if not chosen(answer):
        raise DataError(f"the answer {answer!r} names none of the options")
    return []


def _categories(row: Fields, *columns: str) -> dict[str, list[str]]:
    """Returns the values of these columns; a column may be missing or empty, or hold a list."""
    values: dict[str, list[str]] = {}
    for column in columns:
        cell = row.get(column)
        cells = cast("Sequence[object]", cell) if isinstance(cell, list | tuple) else [cell]
        texts: list[str] = []
        for entry in cells:
            if isinstance(entry, str | int | float):
                texts.append(cell_text(entry, column).strip())
        category = column.replace(" ", "_")
        values[category] = [entry for entry in texts if entry]
    return {category: entries for category, entries in values.items() if entries}


def _disciplines(subject: str) -> dict[str, list[str]]:
    """Returns MMMU's discipline and subject; empty for an unknown subject."""
    disciplines = [name for name, subjects in DISCIPLINES.items() if subject in subjects]
    if not disciplines:
        return {}
    return {"discipline": disciplines, "subject": [subject]}
