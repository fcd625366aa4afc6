"""Implements `cepo doctor`: checks the machine and, with a config, whether its training could start."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from cepo.config import RunConfig, check_config, load_config
from cepo.doctor.findings import Finding, exit_code, findings_table
from cepo.errors import CepoError, ConfigError
from cepo.live_view import SafeConsole


def print_findings(settings: Sequence[str], checks: str | None = None) -> int:
    """Prints what was found; returns 1 if training cannot start, else 0.

    Raises:
        ConfigError: the configuration has an error, or a check is unknown.
    """
    from cepo.doctor.run_checks import CHECKS

    chosen = CHECKS if checks is None else [name.strip() for name in checks.split(",")]
    unknown = [name for name in chosen if name not in CHECKS]
    if unknown:
        raise ConfigError(f"checks={checks}: '{unknown[0]}' is unknown; accepted: {', '.join(CHECKS)}")
    config = load_config(settings) if settings else None
    if config is not None:
        check_config(config)
    findings = _findings(config, chosen)
    console = SafeConsole()
    console.print(findings_table(findings))
    code = exit_code(findings)
    console.print(_verdict(code, with_config=config is not None))
    return code


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
