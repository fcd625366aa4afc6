"""The console script `cepo`: one line per command, each importing only what it needs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence


def _train(arguments: Sequence[str]) -> int:
    from cepo.train import main as train

    return train(arguments)


def _config(arguments: Sequence[str]) -> int:
    from cepo.config.command import run_config_command

    return run_config_command(arguments)


def _report(arguments: Sequence[str]) -> int:
    from cepo.report.command import run_report_command

    return run_report_command(arguments)


def _compare(arguments: Sequence[str]) -> int:
    from cepo.report.command import run_compare_command

    return run_compare_command(arguments)


def _doctor(arguments: Sequence[str]) -> int:
    from cepo.doctor.command import run_doctor_command

    return run_doctor_command(arguments)


def _merge(arguments: Sequence[str]) -> int:
    from cepo.merge import run_merge_command

    return run_merge_command(arguments)


def _evaluate(arguments: Sequence[str]) -> int:
    from cepo.evaluate import run_evaluate_command

    return run_evaluate_command(arguments)


def _microgeo(arguments: Sequence[str]) -> int:
    from cepo.microgeo.__main__ import main as microgeo

    return microgeo(arguments)


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (_train, "train a model: cepo train config=FILE a.b.c=value ..."),
    "config": (_config, "resolve, check and print a config: cepo config config=FILE a.b.c=value ..."),
    "report": (_report, "picture of a run, its credit and its curve: cepo report RUN [--out FILE]"),
    "compare": (_compare, "table of runs by method and seed: cepo compare RUN ... [--out FILE]"),
    "doctor": (_doctor, "whether training could start here: cepo doctor [config=FILE a.b.c=value ...]"),
    "evaluate": (_evaluate, "accuracy on data and benchmarks: cepo evaluate [config=FILE] [checkpoint=...] [data=...]"),
    "merge": (_merge, "a checkpoint as a Hugging Face folder: cepo merge --checkpoint FOLDER --out FOLDER"),
    "microgeo": (_microgeo, "build the embedded world"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Dispatches to a command; 2 for an unknown one."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in COMMANDS:
        return COMMANDS[arguments[0]][0](arguments[1:])
    usage = "\n".join(f"  {name:<9} {text}" for name, (_, text) in COMMANDS.items())
    asked_for_help = bool(arguments) and arguments[0] in ("-h", "--help")
    stream = sys.stdout if asked_for_help else sys.stderr
    stream.write(f"usage: cepo COMMAND ...\n{usage}\n")
    return 0 if asked_for_help else 2


if __name__ == "__main__":
    sys.exit(main())
