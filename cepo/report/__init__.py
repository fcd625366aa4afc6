"""Pages, figures and tables of runs: `write_report`, `save_curves`, `run_summary`, `compare_runs`."""

from cepo.report.compare import Comparison, compare_runs, plot_comparison
from cepo.report.page import save_curves, write_report
from cepo.report.summary import run_summary

__all__ = ["Comparison", "compare_runs", "plot_comparison", "run_summary", "save_curves", "write_report"]
