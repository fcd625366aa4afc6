"""Implements `cepo config`: resolves, checks and prints a configuration without starting a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from cepo.config.checks import check_config
from cepo.config.help import CONFIG, asked_for_help, help_text
from cepo.config.listing import file_schema
from cepo.config.loader import dump_config, load_config
from cepo.errors import ConfigError


def run_config_command(argv: Sequence[str]) -> int:
    """Prints the resolved YAML and, as comments, the plan; with `--help` the usage, with `--schema` the JSON schema.

    Returns:
        0, or 2 with one message on standard error if the configuration has an error.
    """
    try:
        if asked_for_help(argv):
            sys.stdout.write(help_text(CONFIG, argv))
            return 0
        if list(argv) == ["--schema"]:
            sys.stdout.write(json.dumps(file_schema(), indent=1) + "\n")
            return 0
        config = load_config(argv)
        plan = check_config(config)
    except ConfigError as error:
        sys.stderr.write(f"cepo config: {error}\n")
        return 2
    sys.stdout.write(dump_config(config))
    sys.stdout.writelines(f"# {line}\n" for line in plan)
    return 0
