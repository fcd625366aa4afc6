"""Lists the clip rates of the responses that `cepo show` scored, under every method that weights and clips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from cepo.files.trees import Tree
from cepo.report.credit_view import step_credit
from cepo.report.recorded_run import load_run
from cepo.run_folder.trace import read_rollouts

_TITLE = "share of tokens whose weight is clipped: at the lower bound, at the upper bound, together"


@dataclass(frozen=True, kw_only=True)
class _Response:
    """A scored response, with its clip rates by method; None where no token has an advantage."""

    problem: str
    number: str
    verdict: str
    rates: Sequence[Tree | None]


def clip_table(run_folder: Path) -> Table | None:
    """Returns the table of a folder with one recorded step; None if no method clips the weight of any token.

    The last row has the rates over all tokens, which are the metrics `evidence/clip_low_rate` and `evidence/clip_high_rate`.
    """
    groups = list(read_rollouts(run_folder))
    if not groups:
        return None
    step = step_credit(load_run(run_folder), groups)
    responses = _responses(step)
    cells_of_methods: dict[str, list[str]] = {}
    for place, method in enumerate(step["methods"]):
        rates = [response.rates[place] for response in responses]
        if any(rate is not None for rate in rates):
            cells = [_cell(rate) for rate in rates]
            cells_of_methods[method] = [*cells, _cell(_pooled(rates))]
    if not cells_of_methods:
        return None
    table = Table(title=_TITLE, title_justify="left")
    table.add_column("problem")
    table.add_column("response", justify="right")
    table.add_column("verdict")
    for method in cells_of_methods:
        table.add_column(escape(method), justify="right")
    for row, response in enumerate(responses):
        of_methods = [cells[row] for cells in cells_of_methods.values()]
        table.add_row(escape(response.problem), response.number, response.verdict, *of_methods)
    table.add_section()
    over_all_tokens = [cells[-1] for cells in cells_of_methods.values()]
    table.add_row("all", "", "", *over_all_tokens)
    return table


def _responses(step: Tree) -> list[_Response]:
    responses: list[_Response] = []
    num_of_group: dict[int, int] = {}
    for rollout in step["rollouts"]:
        group = rollout["group"]
        number = num_of_group.get(group, 0)
        num_of_group[group] = number + 1
        responses.append(
            _Response(
                problem=step["groups"][group]["prompt_id"],
                number=str(number),
                verdict="right" if rollout["accuracy"] >= 0.5 else "wrong",
                rates=rollout["clip_rates"],
            )
        )
    return responses


def _pooled(rates: Sequence[Tree | None]) -> Tree | None:
    """Returns the rates over all tokens with an advantage; None without any."""
    counted = [rate for rate in rates if rate is not None]
    num_tokens = sum(rate["tokens"] for rate in counted)
    if num_tokens == 0:
        return None
    pooled: Tree = {"tokens": num_tokens}
    for bound in ("lower", "upper"):
        pooled[bound] = sum(rate[bound] * rate["tokens"] for rate in counted) / num_tokens
    return pooled


def _cell(rate: Tree | None) -> str:
    if rate is None:
        return "no advantage"
    lower = rate["lower"]
    upper = rate["upper"]
    return f"{lower:.1%} {upper:.1%} {lower + upper:.1%}"
