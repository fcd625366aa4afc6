"""Declares the type of the words of a command line that are settings."""

from __future__ import annotations

from typing import Any

import click

from cepo.errors import did_you_mean


class SettingType(click.ParamType):
    """The words `config=FILE` and `a.b.c=value` of a command line; the reader of the configuration checks them."""

    name = "setting"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuses a word that can only be a misspelt option of the command."""
        options: dict[str, bool] = {}
        if ctx is not None and not ctx.resilient_parsing:
            options = {str(each.name): each.is_flag for each in ctx.command.params if isinstance(each, click.Option)}
        key = value.partition("=")[0]
        if not all(options.values()) and "." not in key and key != "config":
            known = ("config", *options)
            raise click.UsageError(
                f"argument '{value}':{did_you_mean(key.lstrip('-'), known)} Accepted: "
                f"{', '.join(f'{name}=...' for name in known)}, and settings a.b.c=value",
                ctx,
            )
        return value
