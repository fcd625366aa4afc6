"""Sets the responses of one or two measurements of the same problems side by side, in a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cepo.files.trees import Fields
from cepo.report.html_page import Table
from cepo.report.shown_responses import verdict
from cepo.run_folder.pictures import THUMBNAIL

_MOST_CHARACTERS = 5_000_000
"""Of the responses in one table; more would make a page slow to open."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A graded response to `problem`, an identifier; `row` is the recorded one.

    `found` is the answer that was found in it, and None if that is not recorded.
    """

    problem: str
    is_right: bool
    row: Fields
    found: str | None = None
    category: str = ""

    def text(self, name: str) -> str:
        return str(self.row.get(name) or "")


def samples_table(measured: Mapping[str, Iterable[Sample]]) -> Table:
    """Returns the responses of one or two measurements, by their labels, side by side; changed verdicts are first.

    The responses to a problem are numbered as recorded (`sample`), or else in their order. Every response has the image of
    its problem, though a measurement may have recorded it with one of them alone.
    """
    responses: dict[tuple[str, int], dict[str, Sample]] = {}  # one response in each measurement, by label
    images: dict[str, str] = {}  # by problem
    for label, samples in measured.items():
        num_responses: Counter[str] = Counter()  # so far, by problem
        for sample in samples:
            number = sample.row.get("sample", num_responses[sample.problem])
            num_responses[sample.problem] += 1
            responses.setdefault((sample.problem, number), {})[label] = sample
            image = sample.text("image")
            if THUMBNAIL.fullmatch(image):
                images.setdefault(sample.problem, image)
    all_samples = [sample for by_label in responses.values() for sample in by_label.values()]
    head = ["verdict", "problem", "right answer"]
    has_categories = any(sample.category for sample in all_samples)
    if has_categories:
        head.insert(1, "category")
    has_found = any(sample.found is not None for sample in all_samples)
    if has_found:
        head += [f"answer found {label}".strip() for label in measured]
    head += [f"response {label}".strip() for label in measured]
    pictures = {image: number for number, image in enumerate(dict.fromkeys(images.values()))}
    rows: list[list[str | Fields]] = []
    num_characters = 0
    for by_label in sorted(responses.values(), key=_rank):
        first = next(iter(by_label.values()))
        problem = first.text("problem").replace("<image>", "")
        texts = [by_label[label].text("response") if label in by_label else "" for label in measured]
        num_characters += len(problem) + len(first.text("ground_truth")) + sum(map(len, texts))
        if num_characters > _MOST_CHARACTERS:
            break
        image = images.get(first.problem)
        row: list[str | Fields] = [_verdicts(by_label)]
        if has_categories:
            row.append(first.category)
        row.append({"text": problem, "picture": None if image is None else pictures[image]})
        row.append(first.text("ground_truth"))
        if has_found:
            row += [(by_label[label].found or "") if label in by_label else "" for label in measured]
        rows.append([*row, *texts])
    return Table(
        head=head,
        rows=rows,
        caption=f"{len(rows):,} of {len(responses):,} responses, changed and wrong ones first",
        filters=(0, 1) if has_categories else (0,),
        pictures=list(pictures),
        is_of_cards=True,
    )


def _verdicts(by_label: Mapping[str, Sample]) -> str:
    """Returns the verdict on a response, or both if it has changed."""
    return " → ".join(dict.fromkeys(verdict(sample.is_right) for sample in by_label.values()))


def _rank(by_label: Mapping[str, Sample]) -> tuple[bool, bool]:
    verdicts = _verdicts(by_label)
    return "→" not in verdicts, verdicts == "right"
