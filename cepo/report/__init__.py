"""Presents recorded runs as pages, charts and tables."""
