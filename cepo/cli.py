"""The console script `cepo`: dispatches to its commands, each of which imports only what it needs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from cepo import __version__, interrupts
from cepo.errors import did_you_mean

_USAGE_ERROR = 2


def _train(arguments: Sequence[str]) -> int:
    from cepo.train import main as train

    return train(arguments)


def _config(arguments: Sequence[str]) -> int:
    from cepo.commands.config import run_config_command

    return run_config_command(arguments)


def _report(arguments: Sequence[str]) -> int:
    from cepo.commands.report import run_report_command

    return run_report_command(arguments)


def _show(arguments: Sequence[str]) -> int:
    from cepo.commands.show import run_show_command

    return run_show_command(arguments)


def _compare(arguments: Sequence[str]) -> int:
    from cepo.commands.report import run_compare_command

    return run_compare_command(arguments)


def _doctor(arguments: Sequence[str]) -> int:
    from cepo.commands.doctor import run_doctor_command

    return run_doctor_command(arguments)


def _merge(arguments: Sequence[str]) -> int:
    from cepo.commands.merge import run_merge_command

    return run_merge_command(arguments)


def _evaluate(arguments: Sequence[str]) -> int:
    from cepo.commands.evaluate import run_evaluate_command

    return run_evaluate_command(arguments)


def _credit(arguments: Sequence[str]) -> int:
    from cepo.commands.measure_credit import run_credit_command

    return run_credit_command(arguments)


def _microgeo(arguments: Sequence[str]) -> int:
    from cepo.microgeo.__main__ import main as microgeo

    return microgeo(arguments)


def _completion(arguments: Sequence[str]) -> int:
    from cepo.commands.completion import run_completion_command

    return run_completion_command(arguments, {name: text.partition(":")[0] for name, (_, text) in COMMANDS.items()})


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (_train, "train a model: cepo train config=FILE a.b.c=value ..."),
    "config": (_config, "resolve, check and print a config: cepo config config=FILE a.b.c=value ..."),
    "report": (_report, "page of a run, its curves and its credit: cepo report RUN [--out FILE]"),
    "show": (_show, "credit of a model's tokens without training: cepo show MODEL DATA config=FILE [--response FILE]"),
    "compare": (_compare, "runs by setting and seed, or evaluations: cepo compare RUN ... [--out FILE]"),
    "doctor": (_doctor, "whether training could start here: cepo doctor [config=FILE a.b.c=value ...]"),
    "evaluate": (_evaluate, "accuracy on data and benchmarks: cepo evaluate [config=FILE] [checkpoint=...] [data=...]"),
    "credit": (_credit, "credit and gradients of methods against the truth: cepo credit methods=NAME,NAME ..."),
    "merge": (_merge, "a checkpoint as a Hugging Face folder: cepo merge --checkpoint FOLDER --out FOLDER"),
    "microgeo": (_microgeo, "build the embedded world: cepo microgeo [--folder FOLDER]"),
    "completion": (_completion, "commands and settings at the Tab key: cepo completion bash|zsh|fish"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Dispatches to a command; returns 2 for an unknown one, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else None
    if name in COMMANDS:
        with interrupts.handled():
            try:
                return COMMANDS[name][0](arguments[1:])
            except KeyboardInterrupt:
                sys.stderr.write(f"cepo {name}: interrupted\n")
                return interrupts.EXIT_INTERRUPTED
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
    options = "cepo COMMAND --help explains a command; cepo --version prints the version"
    return "\n".join(["usage: cepo COMMAND ...", *lines, "", options]) + "\n"


def _unknown(name: str) -> str:
    if name.endswith((".yaml", ".yml")) or name.startswith("config="):
        return f"cepo: {name} stands where a command belongs; write cepo train config={name.removeprefix('config=')}\n"
    near = did_you_mean(name.lstrip("-"), COMMANDS)
    return f"cepo: unknown command '{name}'.{near} Commands: {', '.join(COMMANDS)}. cepo --help says what they do\n"


if __name__ == "__main__":
    script()
