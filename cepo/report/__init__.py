"""Pages, figures and tables of runs."""
