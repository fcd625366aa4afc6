"""Figures and tables of finished runs: `write_report`, `run_summary`, `compare_runs`."""

from cepo.report.compare import Comparison, compare_runs, plot_comparison
from cepo.report.page import write_report
from cepo.report.summary import run_summary

__all__ = ["Comparison", "compare_runs", "plot_comparison", "run_summary", "write_report"]
