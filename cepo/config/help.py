"""Prints `--help` for the commands that take `config=FILE a.b.c=value ...`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from cepo.algorithms import available_estimators
from cepo.config.listing import Setting, all_settings
from cepo.errors import ConfigError, did_you_mean

HELP_WORDS = ("-h", "--help")
_WIDTH = 110

_COMMON = """
config=FILE      YAML file, relative to the working directory, or the name of a shipped one such as geo3k/cepo. Its top-level
                 key `base` names a file that it extends.
a.b.c=value      a setting that overrides the file's. Write lists as [a,b], mappings as {{n: 2}}, no value as null. If a
                 setting is given twice, the last one wins.
--help SECTION   list the settings of a section with their defaults, for example: {command} --help data

sections: {sections}
methods (algorithm.adv_estimator): {methods}

The command line overrides the file, and the file the defaults. docs/configuration.md lists every setting,
docs/from-easyr1.md EasyR1's keys.
"""

TRAIN = """\
usage: cepo train config=FILE [a.b.c=value ...]        (the same: python3 -m cepo.train config=FILE ...)

Trains a model. The same command resumes a stopped run from its last checkpoint. Ctrl-C and SIGTERM finish the step and save a
checkpoint first (trainer.save_on_interrupt); a second one ends at once.
{common}
exit code: 0 the run has finished, 1 a fault of cepo itself (a traceback), 2 an error that the message explains, 130 interrupted
by Ctrl-C, 143 ended by SIGTERM

examples:
  cepo train config=configs/microgeo/base.yaml trainer.max_steps=20
  cepo train config=configs/geo3k/cepo.yaml worker.actor.model.model_path=./Qwen3-VL-2B data.train_files=train.parquet
"""

CONFIG = """\
usage: cepo config config=FILE [a.b.c=value ...]
       cepo config --schema

Resolves and checks a configuration and prints it in full as YAML, with the plan that follows from it. No run starts.
--schema prints the JSON schema with which an editor completes and checks a file; configs/schema.json is a copy.
{common}
exit code: 0 the configuration is valid, 2 an error that the message explains

example:
  cepo config config=configs/geo3k/cepo.yaml > resolved.yaml
"""


def asked_for_help(arguments: Sequence[str]) -> bool:
    """Returns whether a command line asks for help."""
    return any(argument in HELP_WORDS for argument in arguments)


def help_text(page: str, arguments: Sequence[str]) -> str:
    """Returns the help page of a command, or the settings of the sections named after `--help`.

    Raises:
        ConfigError: no key begins with such a section.
    """
    sections = [argument for argument in arguments if argument not in HELP_WORDS and "=" not in argument]
    if sections:
        return "\n".join(_described(setting) for name in sections for setting in _below(name)) + "\n"
    command = page.removeprefix("usage: ").partition(" config=")[0]
    names = ", ".join(sorted(_sections()))
    common = _COMMON.format(command=command, sections=_wrapped(names), methods=", ".join(available_estimators()))
    return page.format(common=common)


def _below(name: str) -> list[Setting]:
    name = name.strip(".")
    found = [setting for setting in all_settings() if f"{setting.key}.".startswith(f"{name}.")]
    if not found:
        known = sorted(_sections())
        raise ConfigError(
            f"--help {name}: no setting begins with that.{did_you_mean(name, known)} Sections: {', '.join(known)}"
        )
    return found


def _sections() -> set[str]:
    return {setting.key.rpartition(".")[0] for setting in all_settings()}


def _described(setting: Setting) -> str:
    head = f"{setting.key}={setting.written_default or '(required)'}"
    meaning = f"{setting.help} {setting.accepted.capitalize()}."
    return f"{head}\n{textwrap.fill(meaning, _WIDTH, initial_indent='    ', subsequent_indent='    ')}"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent="    ")
