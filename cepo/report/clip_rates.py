"""Counts the tokens whose weight a method clips, as the training metrics do, by response, and lists them in a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Column, Table

from cepo.algorithms import statistics
from cepo.files.trees import Tree
from cepo.report.shown_responses import verdict
from cepo.types import TokenSignal

if TYPE_CHECKING:
    from torch import Tensor

_TITLE = "share of tokens whose weight is clipped: at the lower bound, at the upper bound, together"


def clip_rates(signal: TokenSignal, response_mask: Tensor) -> dict[int, Tree]:
    """Returns the rates of a method's responses, by row of `response_mask` (B, T).

    They are the shares of the tokens with an advantage, `tokens` in number, whose weight the `lower` bound 1 - r clips,
    and the `upper` bound 1 + r: `evidence/clip_low_rate` and `evidence/clip_high_rate`. A response without any such token
    has none, and so have all those of a method that clips no weights.
    """
    clipping = signal.diagnostics.get("clipping")  # (B, T)
    if clipping is None:
        return {}
    counted = response_mask & (statistics.advantage_sign(signal.advantages) != 0)
    lower = statistics.response_means((clipping < 0).float(), counted).tolist()  # (B,)
    upper = statistics.response_means((clipping > 0).float(), counted).tolist()  # (B,)
    rates: dict[int, Tree] = {}
    for row, num_tokens in enumerate(counted.sum(dim=1).tolist()):
        if num_tokens:
            rates[row] = {"lower": lower[row], "upper": upper[row], "tokens": num_tokens}
    return rates


def clip_table(step: Tree) -> Table | None:
    """Returns the table of a step, as `step_credit` gives it; None if no method clips the weight of any token.

    The last row has the rates over all tokens, which are the metrics.
    """
    rollouts: Sequence[Tree] = step["rollouts"]
    cells: dict[str, list[str]] = {}  # of each method
    for place, method in enumerate(step["methods"]):
        rates = [rollout["clip_rates"][place] for rollout in rollouts]
        if any(rates):
            cells[method] = [_cell(rate) for rate in (*rates, _pooled(rates))]
    if not cells:
        return None
    of_methods = [Column(escape(method), justify="right") for method in cells]
    table = Table(
        "problem", Column("response", justify="right"), "verdict", *of_methods, title=_TITLE, title_justify="left"
    )
    num_of_group: Counter[int] = Counter()
    for row, rollout in enumerate(rollouts):
        group = rollout["group"]
        name = [
            escape(step["groups"][group]["prompt_id"]),
            str(num_of_group[group]),
            verdict(rollout["accuracy"] >= 0.5),
        ]
        num_of_group[group] += 1
        table.add_row(*name, *(column[row] for column in cells.values()), end_section=row == len(rollouts) - 1)
    table.add_row("all", "", "", *(column[-1] for column in cells.values()))
    return table


def _pooled(rates: Sequence[Tree | None]) -> Tree:
    """Returns the rates over all tokens with an advantage."""
    counted = [rate for rate in rates if rate is not None]
    num_tokens = sum(rate["tokens"] for rate in counted)
    pooled: Tree = {}
    for bound in ("lower", "upper"):
        pooled[bound] = sum(rate[bound] * rate["tokens"] for rate in counted) / num_tokens
    return pooled


def _cell(rate: Tree | None) -> str:
    if rate is None:
        return "no advantage"
    lower = rate["lower"]
    upper = rate["upper"]
    return f"{lower:.1%} {upper:.1%} {lower + upper:.1%}"
