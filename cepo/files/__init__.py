"""Handles files and their content: those of others, nested data, temporary folders, secrets in texts."""
