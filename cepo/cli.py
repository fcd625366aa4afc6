"""Implements the console script `cepo`, which dispatches to commands. Each command imports only what it needs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from cepo import __version__, interrupts
from cepo.errors import did_you_mean

_USAGE_ERROR = 2

COMMANDS = {
    "train": ("cepo.train:main", "train a model: cepo train config=FILE a.b.c=value ..."),
    "quickstart": (
        "cepo.commands.first_run:run_quickstart_command",
        "train CEPO on the embedded world for 20 steps and write its report: cepo quickstart",
    ),
    "config": (
        "cepo.commands.config:run_config_command",
        "resolve, check and print a configuration: cepo config config=FILE a.b.c=value ...",
    ),
    "report": (
        "cepo.commands.report:run_report_command",
        "write the report of a run with its curves and token credit: cepo report RUN [--out FILE]",
    ),
    "show": (
        "cepo.commands.show:run_show_command",
        "show the credit of each token without training: cepo show MODEL DATA config=FILE [--response FILE]",
    ),
    "compare": (
        "cepo.commands.report:run_compare_command",
        "compare runs by setting and seed, or evaluations: cepo compare RUN ... [--out FILE]",
    ),
    "doctor": (
        "cepo.commands.doctor:run_doctor_command",
        "check whether training can start on this machine: cepo doctor [config=FILE a.b.c=value ...]",
    ),
    "evaluate": (
        "cepo.commands.evaluate:run_evaluate_command",
        "measure accuracy on data and benchmarks: cepo evaluate [config=FILE] [checkpoint=...] [data=...]",
    ),
    "credit": (
        "cepo.commands.measure_credit:run_credit_command",
        "measure the credit of methods against the truth: cepo credit methods=NAME,NAME ...",
    ),
    "merge": (
        "cepo.commands.merge:run_merge_command",
        "export a checkpoint as a Hugging Face folder: cepo merge --checkpoint FOLDER --out FOLDER",
    ),
    "init": (
        "cepo.commands.first_run:run_init_command",
        "copy the shipped configurations, templates and launchers: cepo init FOLDER",
    ),
    "microgeo": (
        "cepo.microgeo.__main__:main",
        "build the embedded world (problems and model): cepo microgeo [--out FOLDER]",
    ),
    "completion": (
        "cepo.commands.completion:run_completion_command",
        "print a script that completes commands and settings: cepo completion bash|zsh|fish",
    ),
}
"""Maps each command to its function, which takes arguments and returns an exit code, and to a line of help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 2 if it is unknown, 130 after Ctrl-C, 143 after SIGTERM."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else None
    if name in COMMANDS and find_spec("omegaconf") is None:
        sys.stderr.write(f"cepo {name}: only the methods' core is installed; pip install 'cepo[cpu]' or 'cepo[gpu]'\n")
        return _USAGE_ERROR
    if name in COMMANDS:
        module, _, function = COMMANDS[name][0].partition(":")
        with interrupts.handled():
            try:
                return getattr(import_module(module), function)(arguments[1:])
            except KeyboardInterrupt:
                sys.stderr.write(f"cepo {name}: interrupted\n")
                return interrupts.exit_code()
    if name in ("--version", "-V", "version"):
        sys.stdout.write(f"cepo {__version__}\n")
        return 0
    if name in ("-h", "--help", "help"):
        sys.stdout.write(_usage())
        return 0
    sys.stderr.write(_usage() if name is None else _unknown(name))
    return _USAGE_ERROR


def script() -> None:
    """Runs the console script."""
    interrupts.exit_process(main())


def _usage() -> str:
    lines = [f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items()]
    options = "cepo COMMAND --help shows the usage of a command; cepo --version prints the version"
    return "\n".join(["usage: cepo COMMAND ...", *lines, "", options]) + "\n"


def _unknown(name: str) -> str:
    if name.endswith((".yaml", ".yml")) or name.startswith("config="):
        return f"cepo: '{name}' is not a command; write cepo train config={name.removeprefix('config=')}\n"
    near = did_you_mean(name.lstrip("-"), COMMANDS)
    return f"cepo: unknown command '{name}'.{near} Commands: {', '.join(COMMANDS)}. cepo --help describes them\n"


if __name__ == "__main__":
    script()
