"""A chart has one unit, and the metrics that it draws are measured in it."""

from __future__ import annotations

from cepo.report.charts import planned_charts

LEAK = {
    "leak/hint_gap_right": "nats per token",
    "leak/hint_gap_wrong": "nats per token",
    "leak/log_likelihood_gap": "nats per response",
    "leak/mention_fraction": "fraction",
}


def test_each_figure_of_the_leak_probe_has_its_own_unit() -> None:
    """As docs/methods.md defines them: gaps per token, a gap per response, and a share of responses."""
    found = {name: chart.unit for chart, names in planned_charts(sorted(LEAK)) for name in names}
    assert found == LEAK
