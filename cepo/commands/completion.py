"""Completes settings and their values with the Tab key, by click's scripts for the shells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from click.shell_completion import BashComplete, CompletionItem, ZshComplete, add_completion_class

from cepo.errors import did_you_mean

_CONTINUES = ("=", "/")
"""The endings of completions that are not a whole word yet, behind which no blank belongs."""


class SettingType(click.ParamType):
    """The words `config=FILE` and `a.b.c=value` of a command line; the reader of the configuration checks them."""

    name = "setting"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuses a word that can only be a misspelt option of the command."""
        options = {} if ctx is None or ctx.resilient_parsing else _options(ctx)
        key = value.partition("=")[0]
        if not all(options.values()) and "." not in key and key != "config":
            known = ("config", *options)
            raise click.UsageError(
                f"argument '{value}':{did_you_mean(key.lstrip('-'), known)} Accepted: "
                f"{', '.join(f'{name}=...' for name in known)}, and settings a.b.c=value",
                ctx,
            )
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        """Completes a key, or its value: one of its choices, or a path. Bash separates them, as words around a `=`."""
        from cepo.algorithms import available_estimators
        from cepo.config.listing import all_settings

        choices = {setting.key: setting.choices for setting in all_settings()}
        choices |= {"config": (), "algorithm.adv_estimator": tuple(available_estimators())}
        choices |= dict.fromkeys(_options(ctx), ())
        key, separator, begun = incomplete.partition("=")
        words = ["", *(ctx.params.get(str(param.name)) or ())]
        before = f"{key}=" if separator else ""
        if not separator:
            key, begun = words[-2 if words[-1] == "=" else -1], incomplete
        if not separator and key not in choices:
            return [CompletionItem(f"{each}=") for each in choices if each.startswith(incomplete)]
        values = [each for each in choices.get(key, ()) if each.startswith(begun)]
        return [CompletionItem(f"{before}{value}") for value in values or (() if choices.get(key) else _paths(begun))]


def _options(ctx: click.Context) -> dict[str, bool]:
    """Returns whether each option of a command, without `--help`, is a flag."""
    return {str(each.name): each.is_flag for each in ctx.command.params if isinstance(each, click.Option)}


def _paths(begun: str) -> Iterator[str]:
    folder = begun[: begun.rfind("/") + 1]
    for path in sorted(Path(folder or ".").expanduser().glob("*")):
        if path.name.startswith(begun[len(folder) :]) and not path.name.startswith("."):
            yield f"{folder}{path.name}/" if path.is_dir() else f"{folder}{path.name}"


class _Bash(BashComplete):
    source_template = BashComplete.source_template.replace("complete -o nosort", "complete -o nosort -o nospace")

    def format_completion(self, item: CompletionItem[Any]) -> str:
        return super().format_completion(item) + ("" if item.value.endswith(_CONTINUES) else " ")


class _Zsh(ZshComplete):
    source_template = ZshComplete.source_template.replace(
        'elif [[ "$type" == "dir" ]]; then',
        'elif [[ "$type" == "part" ]]; then\n            compadd -U -S "" -- "$key"\n        elif [[ "$type" == "dir" ]]; then',
    )

    def format_completion(self, item: CompletionItem[Any]) -> str:
        return super().format_completion(
            CompletionItem(item.value, "part") if item.value.endswith(_CONTINUES) else item
        )


add_completion_class(_Bash)
add_completion_class(_Zsh)
