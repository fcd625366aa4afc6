"""Takes a row apart by the settings of `data`: its turns, answer, solution, images and videos, whatever their shape."""

from __future__ import annotations

import datetime
import decimal
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from cepo.data.images import located
from cepo.data.json_text import json_text, number_text
from cepo.data.messages import (
    Conversation,
    media_value,
    read_conversation,
    split_answer,
    written_messages,
    written_values,
)
from cepo.errors import DataError
from cepo.files.trees import Fields, is_list, is_mapping
from cepo.models.interface import Turn
from cepo.models.text_codec import IMAGE_MARK

if TYPE_CHECKING:
    from cepo.data.row_settings import CellRules

_TAGGED = re.compile(
    r"(?:<think>.*</think>)?\s*<answer>(?P<inner>(?:(?!</answer>).)*)</answer>", re.DOTALL | re.IGNORECASE
)
_BOXED = re.compile(r"(?P<dollars>\$\$?)?\s*\\boxed\s*\{(?P<inner>.*)\}\s*(?P=dollars)?", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Cells:
    """What a row has for a prompt and its reward; `turns` are without the format prompt."""

    turns: tuple[Turn, ...]
    answer: str
    solution: str | None
    images: list[Any]
    teacher_images: list[Any]
    videos: list[Any]

    @property
    def texts(self) -> Iterable[tuple[str, str]]:
        """The texts that are tokenised, with their names."""
        yield "prompt", "".join(turn.text for turn in self.turns)
        yield "answer", self.answer
        yield "solution", self.solution or ""


def read_cells(row: Fields, rules: CellRules) -> Cells:
    """Returns a row's cells; raises `DataError` if one has a shape that is not accepted. Empty ones are returned as such."""
    prompt = cell(row, rules.prompt_key)
    if isinstance(prompt, str):
        with located(f"column '{rules.prompt_key}'"):
            prompt = written_messages(prompt)
    if rules.answer_key == rules.prompt_key:
        messages, answer = split_answer(prompt, rules.prompt_key)
        conversation = read_conversation(messages)
    else:
        conversation = _conversation(prompt, rules.prompt_key)
        answer = cell_text(without_list_of_one(cell(row, rules.answer_key)), rules.answer_key)
    images = _with_own(conversation.images, _media(row, rules.image_key, "image"))
    turns = conversation.turns
    if rules.puts_marks_in_front:
        turns = _with_marks(turns, len(images))
    return Cells(
        turns=tuple(turns),
        answer=unwrapped(answer),
        solution=solution_of(row, rules.solution_key),
        images=images,
        teacher_images=[] if rules.teacher_image_key is None else _media(row, rules.teacher_image_key, "image"),
        videos=_with_own(conversation.videos, _media(row, rules.video_key, "video")),
    )


def solution_of(row: Fields, key: str) -> str | None:
    """Returns a row's worked solution, None without one; a list or a nested column is its JSON text.

    Raises `DataError` for bytes.
    """
    value = _cell_or_none(row, key)
    text = json_text(value) if is_mapping(value) else cell_text(value, key)
    return text if text.strip() else None


def has_column(columns: Collection[str], key: str) -> bool:
    """Returns whether a source with these columns can have the cell `key`: a column, or dots into a nested one."""
    return root_column(columns, key) in columns


def root_column(columns: Collection[str], key: str) -> str:
    """Returns the name of the column that `key` is, or that it leads into."""
    return key if key in columns else key.partition(".")[0]


def cell(row: Fields, key: str) -> Any:
    """Returns a row's cell; dots lead into nested columns, numbers into lists. A name that itself has the dot comes first.

    Returns None for a column that the row lacks. Raises `DataError` if a nested column has no such entry.
    """
    column = root_column(row, key)
    value = row.get(column)
    return value if column == key else _entry(value, key.removeprefix(f"{column}."), column)


def _entry(value: object, key: str, where: str) -> Any:
    if value is None:
        return None
    if is_mapping(value):
        if has_column(value, key):
            return cell(value, key)
        raise DataError(f"column '{where}' has no '{key}'; it has: {', '.join(map(str, value)) or 'nothing'}")
    first_key, _, inner_key = key.partition(".")
    if is_list(value) and first_key.isdecimal():
        number = int(first_key)
        entry = value[number] if number < len(value) else None
        return _entry(entry, inner_key, f"{where}.{first_key}") if inner_key else entry
    raise DataError(f"column '{where}' holds a {type(value).__name__}, which has no '{key}'")


def _cell_or_none(row: Fields, key: str) -> Any:
    """Returns a cell that a row need not have."""
    try:
        return cell(row, key)
    except DataError:
        return None


def cell_text(value: object, key: str) -> str:
    """Returns a cell as text: empty for None, a number as `number_text`, a date in ISO's form, and a list as JSON.

    Raises `DataError` for anything else.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    try:
        if isinstance(value, bool) or is_list(value):
            return json_text(value) if value != [] else ""
        if isinstance(value, int | float | decimal.Decimal):
            return number_text(value)
    except DataError as error:
        raise DataError(f"column '{key}' {error}") from error
    hint = ""
    if is_mapping(value):
        hint = f". Name one of its entries, for example {key}.{next(iter(value), 'name')}"
    raise DataError(
        f"column '{key}' holds a {type(value).__name__}; accepted: text or a number, or a list of them{hint}"
    )


def without_list_of_one(value: object) -> object:
    """Returns the only entry of a list, which is the answer itself; any other value as it is."""
    while is_list(value) and len(value) == 1:
        value = value[0]
    return value


def unwrapped(answer: str) -> str:
    """Returns an answer without the `\\boxed{}` or the `<answer>` tags that are around all of it, one in the other too."""
    answer = answer.strip()
    while True:
        inner = ""
        tagged = _TAGGED.fullmatch(answer)
        boxed = _BOXED.fullmatch(answer)
        if tagged is not None:
            inner = tagged["inner"].strip()
        elif boxed is not None and _is_balanced(boxed["inner"]):
            inner = boxed["inner"].strip()
        if not inner:
            return answer
        answer = inner


def _is_balanced(text: str) -> bool:
    """Returns whether each brace in a LaTeX text has its partner there, so that those around it belong together."""
    depth = 0
    for character in re.sub(r"\\.", "", text, flags=re.DOTALL):
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
        if depth < 0:
            return False
    return depth == 0


def _conversation(prompt: object, key: str) -> Conversation:
    if isinstance(prompt, list | tuple):
        return read_conversation(cast(object, prompt))
    if prompt is not None and not isinstance(
        prompt, str | int | float | decimal.Decimal | datetime.date | datetime.time
    ):
        raise DataError(
            f"column '{key}' holds a {type(prompt).__name__}; accepted: text, a number, or a list of messages"
        )
    return Conversation([Turn("user", cell_text(prompt, key))], [], [])


def _media(row: Fields, key: str, kind: str) -> list[Any]:
    with located(f"column '{key}'"):
        values = written_values(_listed(_cell_or_none(row, key)))
        return [media_value(value, kind) for value in values]


def _listed(value: object) -> list[Any]:
    """Returns a cell's values as a list: none, one, or several."""
    if value is None or value == "":
        return []
    if isinstance(value, list | tuple):
        return [*cast("Sequence[Any]", value)]
    return [value]


def _with_own(held: list[object], of_row: list[Any]) -> list[Any]:
    """Returns the images of a conversation in order: those that its messages hold, and the row's at the other marks."""
    if all(value is None for value in held):
        return of_row
    remaining = list(of_row)
    images: list[Any] = []
    for value in held:
        if value is not None:
            images.append(value)
        elif remaining:
            images.append(remaining.pop(0))
    return images + remaining


def _with_marks(turns: list[Turn], num_images: int) -> list[Turn]:
    """Returns the turns with the marks that are missing in front of the first text of the user's."""
    num_marks = sum(turn.text.count(IMAGE_MARK) for turn in turns)
    num_missing = num_images - num_marks
    if num_missing <= 0:
        return turns
    first = next((number for number, turn in enumerate(turns) if turn.role == "user"), 0)
    marked = replace(turns[first], text=IMAGE_MARK * num_missing + turns[first].text)
    return [*turns[:first], marked, *turns[first + 1 :]]
