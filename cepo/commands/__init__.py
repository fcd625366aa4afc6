"""Implements the subcommands of `cepo`: arguments in, an exit code out."""
