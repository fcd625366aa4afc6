"""Sets the responses of one or two measurements of the same problems side by side, in a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cepo.files.trees import Fields
from cepo.report.html_page import Table
from cepo.report.shown_responses import verdict
from cepo.run_folder.pictures import THUMBNAIL

_MOST_CHARACTERS = 5_000_000
"""Of the responses in one table; more would make a page slow to open."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A graded response. `problem` and `number` say which response to which problem it is; `row` is the recorded one.

    `found` is the answer that was found in it, and None if that is not recorded.
    """

    problem: str
    number: str
    is_right: bool
    row: Fields
    found: str | None = None
    category: str = ""


def samples_table(measured: Mapping[str, Iterable[Sample]]) -> Table:
    """Returns the responses of one or two measurements, by their labels, side by side; changed verdicts are first.

    Every response has the image of its problem, though a measurement may have recorded it with one of them alone.
    """
    samples_by_name: dict[tuple[str, str], dict[str, Sample]] = {}
    images: dict[str, str] = {}  # by problem
    for label, samples in measured.items():
        for sample in samples:
            samples_by_name.setdefault((sample.problem, sample.number), {})[label] = sample
            image = str(sample.row.get("image") or "")
            if THUMBNAIL.fullmatch(image):
                images.setdefault(sample.problem, image)
    pictures = list(dict.fromkeys(images.values()))
    numbers_of_pictures = {picture: number for number, picture in enumerate(pictures)}
    responses = [_SampledResponse.of(by_label, list(measured)) for by_label in samples_by_name.values()]
    responses.sort(key=lambda response: ("→" not in response.verdict, response.verdict == "right"))
    has_categories = any(response.category for response in responses)
    rows: list[list[str | Fields]] = []
    num_characters = 0
    for response in responses:
        num_characters += response.num_characters
        if num_characters > _MOST_CHARACTERS:
            break
        image = images.get(response.name_of_problem)
        picture = None if image is None else numbers_of_pictures[image]
        problem = {"text": response.problem, "picture": picture}
        category = [response.category] if has_categories else []
        rows.append([response.verdict, *category, problem, response.answer, *response.found, *response.texts])
    headings = [f"response {label}".strip() for label in measured]
    if any(response.found for response in responses):
        headings = [*(f"answer found {label}".strip() for label in measured), *headings]
    return Table(
        head=["verdict", *(["category"] if has_categories else []), "problem", "right answer", *headings],
        rows=rows,
        caption=f"{len(rows):,} of {len(responses):,} responses, changed and wrong ones first",
        filters=(0, 1) if has_categories else (0,),
        pictures=pictures,
        is_of_cards=True,
    )


@dataclass(frozen=True, kw_only=True)
class _SampledResponse:
    """A row of the table: the same response's text in each measurement, with its verdicts in their order."""

    verdict: str
    name_of_problem: str
    problem: str
    answer: str
    category: str
    found: Sequence[str]
    texts: Sequence[str]

    @property
    def num_characters(self) -> int:
        return len(self.problem) + len(self.answer) + sum(map(len, self.texts))

    @classmethod
    def of(cls, by_label: Mapping[str, Sample], labels: Sequence[str]) -> _SampledResponse:
        verdicts = [verdict(sample.is_right) for sample in by_label.values()]
        texts: list[str] = []
        for label in labels:
            text = ""
            if label in by_label:
                text = str(by_label[label].row.get("response", ""))
            texts.append(text)
        found: list[str] = []
        if any(sample.found is not None for sample in by_label.values()):
            found = [(by_label[label].found or "") if label in by_label else "" for label in labels]
        first_sample = next(iter(by_label.values()))
        problem = str(first_sample.row.get("problem") or "")
        return cls(
            verdict=" → ".join(dict.fromkeys(verdicts)),
            name_of_problem=first_sample.problem,
            problem=problem.replace("<image>", ""),
            answer=str(first_sample.row.get("ground_truth") or ""),
            category=first_sample.category,
            found=found,
            texts=texts,
        )
