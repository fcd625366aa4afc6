"""Implements `cepo completion bash|zsh|fish`: prints a script that completes commands and settings with the Tab key.

The script contains all words, so that completion does not start Python. It lacks the settings of plugins.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from cepo.algorithms import available_estimators
from cepo.cli import COMMANDS
from cepo.commands import evaluate, measure_credit
from cepo.config.listing import all_settings
from cepo.errors import did_you_mean

_USAGE_ERROR = 2
_USAGE = """\
usage: cepo completion bash|zsh|fish

Prints a script with which the shell completes commands, settings and their values. Install it with:

  bash   eval "$(cepo completion bash)"                          in ~/.bashrc
  zsh    eval "$(cepo completion zsh)"                           in ~/.zshrc, after compinit
  fish   cepo completion fish > ~/.config/fish/completions/cepo.fish
"""

TAKE_SETTINGS = ("train", "config", "doctor", "evaluate", "credit", "show")
OPTIONS: dict[str, tuple[str, ...]] = {
    "report": ("--out", "--png", "--pdf", "--plugin", "--open", "--watch"),
    "show": ("--response", "--problems", "--out"),
    "compare": ("--out",),
    "merge": (
        *("--checkpoint", "--out", "--base", "--dtype", "--chat-template"),
        *("--trust-remote-code", "--upload", "--public"),
    ),
    "microgeo": ("--out", "--seed", "--num-train", "--num-validation"),
}
"""The options of commands, except `--help`, which every command has."""
OWN_KEYS = {"evaluate": evaluate.OWN_KEYS, "credit": measure_credit.OWN_KEYS}
"""The arguments `key=value` of a command that are not settings."""


def run_completion_command(argv: Sequence[str]) -> int:
    """Prints the script of the shell that `argv` names.

    Returns:
        0, or 2 with a message on standard error if the shell is not supported.
    """
    if any(argument in ("-h", "--help") for argument in argv):
        sys.stdout.write(_USAGE)
        return 0
    if len(argv) != 1 or argv[0] not in _SCRIPTS:
        near = did_you_mean(argv[0], _SCRIPTS) if argv else ""
        sys.stderr.write(f"cepo completion: name one shell of {', '.join(_SCRIPTS)}.{near}\n{_USAGE}")
        return _USAGE_ERROR
    descriptions = {name: text.partition(":")[0] for name, (_, text) in COMMANDS.items()}
    sys.stdout.write(_SCRIPTS[argv[0]](descriptions))
    return 0


def _choices() -> dict[str, tuple[str, ...]]:
    methods = {"algorithm.adv_estimator": tuple(available_estimators()), "dry_run": ("true",)}
    return {setting.key: setting.choices for setting in all_settings() if setting.choices} | methods


def _keys(command: str) -> list[str]:
    return ["config", *OWN_KEYS.get(command, ()), *(setting.key for setting in all_settings())]


def _bash(commands: Mapping[str, str]) -> str:
    keys = "\n".join(f"        {name}) words={_quoted(_keys(name))} ;;" for name in TAKE_SETTINGS)
    options = "\n".join(f"        {name}) words={_quoted([*words, '--help'])} ;;" for name, words in OPTIONS.items())
    values = "\n".join(f"        {key}) words={_quoted(words)} ;;" for key, words in _choices().items())
    return f"""\
# bash completion of cepo; written by: cepo completion bash
_cepo() {{
    # Bash breaks words at '=' too: the whole argument is what stands behind the last blank.
    local line=${{COMP_LINE:0:COMP_POINT}} words="" key value
    local argument=${{line##*[[:space:]]}}
    COMPREPLY=()
    if [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W {_quoted([*commands, "--help", "--version"])} -- "$argument"))
        return
    fi
    if [[ $argument != *=* ]]; then
        case ${{COMP_WORDS[1]}} in
{keys}
{options}
        completion) words="bash zsh fish" ;;
        esac
        case ${{COMP_WORDS[1]}} in
        {"|".join(TAKE_SETTINGS)})
            if [[ $argument == -* ]]; then words="--help"; else compopt -o nospace; words="${{words// /= }}="; fi
            COMPREPLY=($(compgen -W "$words" -- "$argument")) ;;
        completion) COMPREPLY=($(compgen -W "$words" -- "$argument")) ;;
        *)
            if [[ $argument == -* ]]; then COMPREPLY=($(compgen -W "$words" -- "$argument"))
            else compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$argument"); fi ;;
        esac
        return
    fi
    key=${{argument%%=*}} value=${{argument#*=}}
    case $key in
{values}
    esac
    if [[ -n $words ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$value"))
    else
        compopt -o filenames
        mapfile -t COMPREPLY < <(compgen -f -- "$value")
    fi
    [[ $COMP_WORDBREAKS == *=* ]] || COMPREPLY=("${{COMPREPLY[@]/#/$key=}}")
}}
complete -F _cepo cepo
"""


def _zsh(commands: Mapping[str, str]) -> str:
    described = "\n".join(f"            {_quoted([f'{name}:{text}'])}" for name, text in commands.items())
    keys = "\n".join(f"        {name}) keys=({' '.join(_keys(name))}) ;;" for name in TAKE_SETTINGS)
    options = "\n".join(f"        {name}) options=({' '.join(words)}) ;;" for name, words in OPTIONS.items())
    values = "\n".join(f"        {key}) values=({' '.join(words)}) ;;" for key, words in _choices().items())
    return f"""\
#compdef cepo
# zsh completion of cepo; written by: cepo completion zsh
_cepo() {{
    local -a commands keys options values
    if (( CURRENT == 2 )); then
        commands=(
{described}
        )
        _describe command commands
        return
    fi
    options=()
    case $words[2] in
{keys}
{options}
        completion) compadd bash zsh fish; return ;;
    esac
    if [[ $PREFIX == *=* ]]; then
        local key=${{PREFIX%%=*}}
        compset -P '*='
        case $key in
{values}
        esac
        if (( $#values )); then compadd -a values; else _files; fi
    elif [[ $PREFIX == -* ]]; then
        compadd -- --help $options
    elif (( $#keys )); then
        compadd -S = -a keys
    else
        _files
    fi
}}
compdef _cepo cepo
"""


def _fish(commands: Mapping[str, str]) -> str:
    lines = ["# fish completion of cepo; written by: cepo completion fish", "complete -c cepo -f"]
    lines += [
        f"complete -c cepo -n __fish_use_subcommand -a {name} -d {_quoted([text])}" for name, text in commands.items()
    ]
    lines.append("complete -c cepo -n __fish_use_subcommand -l version -d 'print the version'")
    lines.append("complete -c cepo -l help -d 'explain a command'")
    for name, words in OPTIONS.items():
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        lines.append(f"complete -c cepo {seen} -F")
        lines += [f"complete -c cepo {seen} -l {word.removeprefix('--')}" for word in words]
    lines.append("complete -c cepo -n '__fish_seen_subcommand_from completion' -a 'bash zsh fish'")
    helps, choices = {setting.key: setting.help for setting in all_settings()}, _choices()
    in_all = f"-n '__fish_seen_subcommand_from {' '.join(TAKE_SETTINGS)}'"
    for key in _keys(""):
        words = " ".join(f"{key}={word}" for word in choices.get(key, ("",)))
        lines.append(f"complete -c cepo {in_all} -a {_quoted([words])} -d {_quoted([helps.get(key, '')])}")
    for name, keys in OWN_KEYS.items():
        lines += [f"complete -c cepo -n '__fish_seen_subcommand_from {name}' -a '{key}='" for key in keys]
    lines.append(f"complete -c cepo {in_all} -a '(__fish_complete_suffix .yaml)'")
    return "\n".join(lines) + "\n"


def _quoted(words: Sequence[str]) -> str:
    return "'" + " ".join(words).replace("'", "'\\''") + "'"


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
