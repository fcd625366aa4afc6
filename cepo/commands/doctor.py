"""Implements `cepo doctor`: checks the machine and, with a config, whether its training could start."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from cepo.config import RunConfig, check_config, load_config
from cepo.doctor.findings import Finding, exit_code, findings_table
from cepo.errors import CepoError, ConfigError
from cepo.terminal import SafeConsole

_BAD_CONFIG = 2
_CHECKS = "checks="
_USAGE = """\
usage: cepo doctor [config=FILE a.b.c=value ...] [checks=NAME,NAME,...]

Checks versions, devices and memory of this machine against the tested ones. With a configuration, also checks whether
its training can start.

checks         which checks to run: machine, engine, memory, start, data, disk; default: all

exit code: 0 training can start, 1 it cannot (the message says what to do), 2 the configuration has an error
"""


def run_doctor_command(argv: Sequence[str], *, console: Console | None = None) -> int:
    """Prints the findings; returns 0 if training can start, 1 if it cannot, 2 if the configuration has an error."""
    if any(argument in ("-h", "--help") for argument in argv):
        sys.stdout.write(_USAGE)
        return 0
    console = console or SafeConsole()
    config = None
    try:
        checks, settings = _checks(argv)
        if settings:
            config = load_config(settings)
            check_config(config)
    except ConfigError as error:
        sys.stderr.write(f"cepo doctor: {error}\n")
        return _BAD_CONFIG
    findings = _findings(config, checks)
    console.print(findings_table(findings))
    code = exit_code(findings)
    console.print(_verdict(code, with_config=config is not None))
    return code


def _checks(argv: Sequence[str]) -> tuple[Sequence[str], list[str]]:
    from cepo.doctor.run_checks import CHECKS

    named = [argument.removeprefix(_CHECKS) for argument in argv if argument.startswith(_CHECKS)]
    checks = [name.strip() for part in named for name in part.split(",")] or list(CHECKS)
    unknown = [name for name in checks if name not in CHECKS]
    if unknown:
        raise ConfigError(f"checks={','.join(checks)}: '{unknown[0]}' is unknown; accepted: {', '.join(CHECKS)}")
    return checks, [argument for argument in argv if not argument.startswith(_CHECKS)]


def _findings(config: RunConfig | None, checks: Sequence[str]) -> list[Finding]:
    """Returns all findings; if a library is missing, only those about versions."""
    from cepo.doctor.versions import installed_versions, version_findings

    installed = installed_versions()
    findings = version_findings(installed)
    if any(finding.mark == "fail" and installed[finding.subject] is None for finding in findings):
        return findings
    from cepo.doctor.machine import look_at_machine, machine_findings

    machine = look_at_machine()
    findings = [*findings, *machine_findings(machine)] if "machine" in checks else []
    if config is None:
        return findings
    from cepo.doctor.run_checks import run_findings
    from cepo.microgeo.world import with_embedded_world

    try:
        config = with_embedded_world(config)
    except CepoError as error:
        remedy = "build it by itself to see why: cepo microgeo"
        return [*findings, Finding("data", "microgeo", "fail", str(error), remedy=remedy)]
    return findings + run_findings(config, machine, checks)


def _verdict(code: int, *, with_config: bool) -> Text:
    if code:
        return Text("Training cannot start: see the lines marked fail.", style="bold red")
    subject = "Training can start." if with_config else "No problem found. To check a run, give its configuration."
    return Text(subject, style="bold green")
