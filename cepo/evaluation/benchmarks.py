"""Describes the format of each benchmark: its columns, and how its rows become problems with answers to grade."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from cepo.data.reading import read_row, without_decoding
from cepo.errors import DataError
from cepo.models.processing import IMAGE_MARK
from cepo.rewards.benchmark import LETTERS, kind_of, options_in_text
from cepo.trees import Fields, Tree

_OPTION = re.compile(r"(?:^|;)\s*([A-J])\.\s*")
_MMMU_MARK = re.compile(r"<image (\d)>")


@dataclass(frozen=True)
class Benchmark:
    """The format of one benchmark, which its `columns` identify, the column `image` among them.

    `convert` turns a row into what differs from an image, its `question` and its `answer`: `problem`, `images`, `answer`,
    and for grading `answer_kind`, `choices`, `tolerance` and `cluster`; rows with the same cluster are dependent.
    """

    name: str
    columns: set[str]
    image: str
    convert: Callable[[Fields], Tree]
    has_variants: bool = False  # rows of one cluster are variants of one question


def recognise(columns: Sequence[str]) -> Benchmark | None:
    """Returns the benchmark that has these columns, or None if the format is unknown."""
    return next((known for known in BENCHMARKS if known.columns <= set(columns)), None)


def converted(rows: Any, benchmark: Benchmark) -> Any:
    """Converts a datasets table to problems without decoding images; raises `DataError` with a bad row's number."""
    rows, problems = without_decoding(rows), []
    for number in range(len(rows)):
        usual: Tree = {"benchmark": benchmark.name, "answer_kind": None, "choices": [], "tolerance": None}
        try:
            row = read_row(rows, number)
            images = [image for image in [row.get(benchmark.image)] if image is not None]
            usual |= {"problem": IMAGE_MARK + row["question"], "images": images}
            usual |= {"answer": row.get("answer"), "cluster": str(number)}
            problems.append(usual | benchmark.convert(row))
        except (ValueError, SyntaxError, KeyError) as error:
            raise DataError(
                f"{benchmark.name}, row {number}: it does not match this benchmark's format ({error})"
            ) from error
    return Dataset.from_list(problems)


def _dynamath(row: Fields) -> Tree:
    kind = {"float": "numeric", "multiple choice": "choice"}.get(row["answer_type"], "text")
    return {
        "answer": row["ground_truth"],
        "answer_kind": kind,
        "choices": options_in_text(row["question"]) if kind == "choice" else [],
        "tolerance": 1e-3,
        "cluster": str(row["id"]),
    }


def _mathvision(row: Fields) -> Tree:
    options = list(row["options"] or [])
    named = [] if options == list(LETTERS[: len(options)]) else options
    return {
        "problem": IMAGE_MARK + row["question"] + _listed(options),
        "answer_kind": "choice" if options else kind_of(row["answer"]),
        "choices": named or [""] * len(options),
        "tolerance": 5e-3,
    }


def _wemath(row: Fields) -> Tree:
    parts = _OPTION.split(row["option"])
    letters, options = "".join(parts[1::2]), [text.strip() for text in parts[2::2]]
    if letters != LETTERS[: len(options)]:
        raise ValueError(f"the options {row['option']!r} do not run from A")
    return {
        "problem": IMAGE_MARK + row["question"] + _listed(options),
        "answer_kind": "choice",
        "choices": options,
        "cluster": str(row["ID"]),
    }


def _mmmu(row: Fields) -> Tree:
    options = [str(option) for option in ast.literal_eval(row["options"] or "[]")]
    is_choice = row["question_type"] == "multiple-choice"
    kind = "choice" if is_choice else kind_of(row["answer"])
    text, images = _with_images_in_place(row["question"] + (_listed(options) if is_choice else ""), row)
    return {
        "problem": text,
        "images": images,
        "answer_kind": "text" if kind == "choice" and not is_choice else kind,
        "choices": [_MMMU_MARK.sub("", option) for option in options] if is_choice else [],
    }


def _logicvista(row: Fields) -> Tree:
    return {"answer_kind": kind_of(row["answer"]), "choices": options_in_text(row["question"])}


def _listed(options: Sequence[str]) -> str:
    """Lists the options below the question and asks for a letter; empty without options."""
    if not options:
        return ""
    lines = [letter if letter == text else f"{letter}. {text}" for letter, text in zip(LETTERS, options, strict=False)]
    return "\nChoices:\n" + "\n".join(lines) + "\nAnswer with the letter of the right choice."


def _with_images_in_place(text: str, row: Fields) -> tuple[str, list[Any]]:
    """Returns MMMU's text with images at their first mention or, without one, at the start; and the images in order."""
    left = {str(number): row[f"image_{number}"] for number in range(1, 8) if row.get(f"image_{number}") is not None}
    mentioned: list[Any] = []

    def place(match: re.Match[str]) -> str:
        if match[1] not in left:
            return f"image {match[1]}"
        mentioned.append(left.pop(match[1]))
        return IMAGE_MARK

    text = _MMMU_MARK.sub(place, text)
    return IMAGE_MARK * len(left) + text, [*left.values(), *mentioned]


_QUESTION = {"question", "answer"}
BENCHMARKS = (
    Benchmark(
        "dynamath", {"question", "ground_truth", "answer_type", "id", "decoded_image"}, "decoded_image", _dynamath, True
    ),
    Benchmark("mathvision", _QUESTION | {"options", "decoded_image"}, "decoded_image", _mathvision),
    Benchmark("wemath", _QUESTION | {"ID", "option", "image_path"}, "image_path", _wemath),
    Benchmark("mmmu", _QUESTION | {"options", "question_type", "image_1"}, "image_1", _mmmu),
    Benchmark("logicvista", _QUESTION | {"image"}, "image", _logicvista),
)
