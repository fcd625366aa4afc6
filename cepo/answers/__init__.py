"""Decides whether an answer states a given truth. Imports nothing else of the package."""
