"""The former name of `cepo.data.row_settings`, kept for one release."""

from cepo.data.row_settings import CellRules, ProblemRules, RowRules

__all__ = ["CellRules", "ProblemRules", "RowRules"]
