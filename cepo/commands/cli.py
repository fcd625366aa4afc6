"""Declares the console script `cepo`: its commands, their arguments and their help. A command imports its work when it runs."""

from __future__ import annotations

import sys
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import click

from cepo import __version__
from cepo.errors import CepoError, ConfigError, did_you_mean
from cepo.terminal import interrupts
from cepo.terminal.lines import print_plain

_USAGE_ERROR = 2
_FILE = click.Path(path_type=Path, dir_okay=False)
_FOLDER = click.Path(path_type=Path, file_okay=False)
_PACKAGES = ("torch", "transformers", "datasets", "ray", "vllm", "trl", "peft")
"""Libraries whose names users give to their own files, which then come first on the path."""
_MEANT = {
    "resume": "The same cepo train command goes on from the last checkpoint",
    "sft": "TRL fine-tunes on worked responses: examples/sft_first",
    "test": "cepo evaluate CHECKPOINT measures accuracy on any data",
    "predict": "cepo evaluate CHECKPOINT data=FILE writes the responses to any problems",
    "generate": "cepo evaluate CHECKPOINT data=FILE writes the responses to any problems",
    "infer": "cepo evaluate CHECKPOINT data=FILE writes the responses to any problems",
    "serve": "cepo merge --checkpoint CHECKPOINT --out FOLDER writes a model that vllm serve loads",
    "export": "cepo merge --checkpoint CHECKPOINT --out FOLDER writes a model",
}
"""What there is in place of commands that other programs have."""
_WORDS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def _settings_given(ctx: click.Context, _: click.Parameter, words: Sequence[str]) -> Sequence[str]:
    """Returns the settings as `key=value`; refuses a word that can only be a misspelt option of the command."""
    from cepo.config.arguments import settings_in
    from cepo.config.unknown_keys import what_to_write

    options = [parameter for parameter in ctx.command.params if isinstance(parameter, click.Option)]
    has_values = not all(option.is_flag for option in options)
    known = ["config", *(str(option.name) for option in options)]
    accepted = ", ".join(f"{name}=..." for name in known)

    def explained(key: str, value: str) -> str:
        if has_values and "." not in key:
            return f"{did_you_mean(key, known).strip()} Accepted: {accepted}, and settings a.b.c=value".strip()
        return what_to_write(key, value)

    try:
        settings = tuple(settings_in(words, explained))
    except ConfigError as error:
        raise click.UsageError(str(error), ctx) from None
    for setting in settings:
        key, _separator, value = setting.partition("=")
        if has_values and "." not in key and key != "config":
            raise click.UsageError(f"argument '{setting}': {explained(key, value)}", ctx)
    return settings


takes_settings = click.argument(
    "settings", nargs=-1, callback=_settings_given, metavar="[config=FILE] [a.b.c=value]..."
)  # fmt: skip


@contextmanager
def _loading_libraries() -> Generator[None]:
    """Says that libraries are loaded if it takes longer than 5 s."""
    from cepo.terminal.progress import log_to_stderr, phase

    log_to_stderr()
    with phase("loading libraries", is_brief=True):
        yield


class Command(click.Command):
    """A command whose options may also be written as its settings are: `out=FILE` is `--out FILE`.

    An error of cepo or of the operating system becomes a message on standard error and exit code 2.
    """

    explained: ClassVar[tuple[type[Exception], ...]] = (CepoError, OSError)
    """The errors whose message suffices; others end with a traceback."""

    def __init__(self, *args: Any, first_words: Sequence[str] = (), **options: Any) -> None:
        super().__init__(*args, **options)
        self.first_words = first_words
        """The options that the command's first words without a name give."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # The reader of the configuration explains a word that begins with dashes, unless another argument would take it.
        arguments = [parameter.name for parameter in self.params if isinstance(parameter, click.Argument)]
        ctx.ignore_unknown_options = arguments == ["settings"]
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        return super().parse_args(ctx, self._with_options(args, ctx))

    def _with_options(self, words: Sequence[str], ctx: click.Context) -> list[str]:
        """Returns the words with `name=value` and the first words written as options."""
        options: dict[str, click.Option] = {}
        for parameter in self.params:
            if isinstance(parameter, click.Option):
                options |= {spelling.lstrip("-"): parameter for spelling in parameter.opts}
        rewritten: list[str] = []
        remaining = list(self.first_words)
        for previous_word, word in zip(["", *words], words, strict=False):
            name, separator, value = word.partition("=")
            option = options.get(name.replace("_", "-"))
            previous = options.get(previous_word.lstrip("-")) if previous_word.startswith("-") else None
            is_value_of_option = previous is not None and not previous.is_flag
            if is_value_of_option:
                rewritten.append(word)
            elif separator and option is not None and option.is_flag:
                rewritten += [option.opts[-1]] if click.BOOL.convert(value, option, ctx) else []
            elif separator and option is not None:
                rewritten.append(f"{option.opts[-1]}={value}")
            elif remaining and not separator and not word.startswith("-"):
                rewritten.append(f"--{remaining.pop(0)}={word}")
            else:
                rewritten.append(word)
        return rewritten

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except self.explained as error:
            print_plain(f"{ctx.command_path}: {error}", to_stderr=True)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            print_plain(
                f"{ctx.command_path} needs torch: pip install -e '.[cpu]' or '.[gpu]', in cepo's checkout",
                to_stderr=True,
            )
        return _USAGE_ERROR


class Training(Command):
    """A command that trains, in which an error of the operating system can be a bug in cepo: it keeps its traceback."""

    explained: ClassVar[tuple[type[Exception], ...]] = (CepoError,)


class Commands(click.Group):
    """The group of all commands, in the order of their declaration."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands]

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] not in self.commands:
            ctx.fail(f"No such command '{args[0]}'.{_command_meant(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


def _command_meant(word: str, commands: Collection[str]) -> str:
    """Returns what to write in place of a word that is no command: a command, or the setting that the word is a value of."""
    from cepo.algorithms import available_estimators
    from cepo.config.paths import config_names

    file = word.removeprefix("config=")
    if file in config_names() or file.endswith((".yaml", ".yml")):
        return f" It is a configuration; write cepo train config={file}"
    if word in available_estimators():
        return f" It is a method; write cepo train config=FILE algorithm.adv_estimator={word}"
    if word in _MEANT:
        return f" {_MEANT[word]}"
    if "=" in word:
        return f" It is a setting; write cepo train config=FILE {word}"
    return did_you_mean(word, commands) or f" Commands: {', '.join(commands)}"


@click.group(
    cls=Commands, context_settings=_WORDS, epilog="cepo help SECTION lists the settings of a section, such as data."
)
@click.version_option(__version__, "-V", "--version", message="cepo %(version)s")
def cli() -> None:
    """Trains vision-language models with rewards, and shows what each token learns."""
    if find_spec("omegaconf") is None:
        raise click.UsageError(
            "only the methods' core is installed; pip install -e '.[cpu]' or '.[gpu]', in cepo's checkout"
        )
    for name in _PACKAGES:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is None:
            raise click.UsageError(f"{spec.origin} takes the place of the library {name}; give the file another name")


@cli.command(cls=Training)
@takes_settings
def train(settings: Sequence[str]) -> int:
    """Train a model.

    The same command resumes a stopped run from its last checkpoint. Ctrl-C and SIGTERM finish the step and save a
    checkpoint first (trainer.save_on_interrupt); a second one ends at once.

    config=FILE is a YAML file, or the name of a shipped one such as geo3k/cepo. Its key `base` names a file that it
    extends. A setting a.b.c=value overrides the file's; write lists as [a,b], mappings as {n: 2}, no value as null.
    cepo help SECTION lists the settings of a section.

    Exit code: 0 the run has finished, 1 a bug in cepo (a traceback), 2 an error that the message explains, 130
    interrupted by Ctrl-C, 143 ended by SIGTERM.

    \b
    cepo train config=microgeo/base trainer.max_steps=20
    cepo train config=geo3k/cepo worker.actor.model.model_path=./Qwen3-VL-2B data.train_files=train.parquet
    """
    from cepo.train import main

    return main(settings)


@cli.command(cls=Training, short_help="Train on the built-in toy task, and write the report.")
@takes_settings
def quickstart(settings: Sequence[str]) -> int:
    """Train CEPO on the built-in toy task for 20 steps and write its report.

    The run folder is checkpoints/cepo/quickstart in the working directory.
    """
    from cepo.commands.report import write_report_of_run
    from cepo.config import load_config
    from cepo.train import main

    for setting in settings:
        if setting.startswith("config="):
            raise ConfigError(f"it has its own configuration; write cepo train {setting}")
    arguments = ["config=microgeo/quickstart", *settings]
    code = main(arguments)
    if code == 0:
        write_report_of_run(load_config(arguments).trainer.run_folder, show=True)
    return code


@cli.command(short_help="Resolve, check and print a configuration.")
@takes_settings
def config(settings: Sequence[str]) -> None:
    """Resolve, check and print a configuration, with the plan that follows from it.

    \b
    cepo config config=geo3k/cepo > resolved.yaml
    """
    from cepo.config import check_config, load_config
    from cepo.config.record import dump_config

    resolved = load_config(settings)
    plan = check_config(resolved)
    sys.stdout.write(dump_config(resolved) + "".join(f"# {line}\n" for line in plan))


@cli.command(short_help="Summarise a run and write its page.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--out", type=_FILE, help="Page to write; default: report.html in the run folder.")
@click.option("--png", "figures", type=_FILE, multiple=True, help="Also save the curves as a PNG file.")
@click.option("--pdf", "figures", type=_FILE, multiple=True, help="Also save the curves as a PDF file.")
@click.option("--open", "show", is_flag=True, help="Open the page if there is a display.")
@click.option(
    "--plugin", "plugins", type=_FILE, multiple=True, help="Python file that registers further methods; repeatable."
)
@click.option("--watch", is_flag=True, help="Update the page while the run continues, until Ctrl-C.")
def report(run: Path, **options: Any) -> None:
    """Print the summary of the run in folder RUN and write its report as an HTML page."""
    from cepo.commands.report import write_report_of_run

    write_report_of_run(run, **options)


@cli.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path())
@click.option(
    "--out",
    type=_FILE,
    multiple=True,
    help="Write the table (.md .tex .json), page (.html) or curves (.png .pdf .svg); repeatable.",
)
def compare(runs: Sequence[str], out: Sequence[Path]) -> None:
    """Compare runs by setting and seed, or evaluations.

    Runs that differ only in seeds are repeats. RUN may also be a folder of cepo evaluate or a table in JSON.
    """
    from cepo.commands.report import compare_runs_or_tables

    compare_runs_or_tables(runs, out)


@cli.command()
@click.argument("model", type=click.Path())
@click.argument("data", type=click.Path())
@takes_settings
@click.option("--response", type=_FILE, help="Text file that replaces the first sampled response.")
@click.option("--problems", type=click.IntRange(min=1), default=1, show_default=True, help="Number of problems.")
@click.option("--out", type=click.Path(path_type=Path), default="shown", show_default=True, help="Folder for the page.")
def show(model: str, data: str, settings: Sequence[str], **options: Any) -> None:
    """Show the credit of each token without training.

    MODEL is global_step_<N> of a run, a model folder or a hub name; DATA are problems, in the forms of data.train_files.
    config=FILE is required: it defines the prompts, the method and its teachers.
    """
    from cepo.commands.show import show_credit

    show_credit(model, data, settings, **options)


@cli.command(short_help="Show the rollouts of any trainer, and why it does not learn.")
@click.argument("place", type=click.Path(path_type=Path))
@click.option("--out", type=_FILE, default="look.html", show_default=True, help="Page to write.")
@click.option(
    "--most", type=click.IntRange(1), default=200_000, show_default=True, help="Rollouts read, of a larger run."
)
@click.option("--model", help="Score tokens by two teachers with this model: a folder, a hub name or global_step_<N>.")
@click.option("--responses", type=click.IntRange(2), default=32, show_default=True, help="Responses that it scores.")
@click.option("--image", type=_FILE, help="Also draw the clearest pair as a still picture, FILE.svg.")
@click.option("--follow", "follows", is_flag=True, help="Write the page again when files grow, until Ctrl-C.")
def look(place: Path, **options: Any) -> None:
    """Show the rollouts that lie in folder or file PLACE as one page, and say why the run does not learn.

    Recognised are TRL's completions/*.parquet, verl's rollout_data_dir, NeMo-RL's train_data_step*.jsonl, prime-rl's
    train_rollouts.jsonl, EasyR1's generations.log, runs of cepo, and JSON lines or Parquet with prompt, completion and
    reward.
    """
    from cepo.commands.look import look_at

    look_at(place, **options)


@cli.command()
@takes_settings
def doctor(settings: Sequence[str]) -> int:
    """Check whether training can start on this machine.

    Compares versions, driver, devices and compilers with what is needed; with a configuration, also the devices, the
    engine, the memory and the disk that its run needs. Data, rewards and checkpoints are checked by cepo train itself.

    Exit code: 0 training can start, 1 it cannot (the message says what to do), 2 the configuration has an error.
    """
    with _loading_libraries():
        from cepo.commands.doctor import print_findings

    return print_findings(settings)


@cli.command(first_words=("checkpoint",), short_help="Measure accuracy on datasets and benchmarks.")
@click.option("--checkpoint", help="global_step_<N>, a model folder or a hub name; default: the configuration's model.")
@click.option(
    "--data",
    help="Hub names, files or folders, or microgeo:validation, with commas; NAME: before one names a benchmark, as in "
    "mathvista:FILE. Default: data.val_files.",
)
@click.option("--out", help="New folder for the results; default: evaluations/<checkpoint>.")
@click.option("-n", "--n", help="Responses per problem: worker.rollout.val_override_config.n.")
@click.option("--temperature", help="Sampling temperature; 0 is greedy.")
@click.option("--top-p", help="Sample from the most probable tokens that have this probability together.")
@click.option("--top-k", help="Sample from this many of the most probable tokens.")
@click.option("--presence-penalty", help="Lower the logits of tokens that the response already has by this much.")
@click.option(
    "--protocol",
    type=click.Choice(("paper", "lmms")),
    help="paper: sample as the paper did (n=1 temperature=1 top_p=1 top_k=40 presence_penalty=2, 32,000 tokens). "
    "lmms: prompts, tags and limits of lmms-eval's reasoning tasks (n=1 temperature=0, 49,152 tokens).",
)
@click.option("--judge", metavar="ADDRESS", help="OpenAI-compatible server, up to /v1, that judges free-form answers.")
@click.option("--judge-model", metavar="MODEL", help="Its model.")
@click.option("--dry-run", is_flag=True, help="Print the plan without starting an engine.")
@takes_settings
def evaluate(settings: Sequence[str], dry_run: bool, **options: str | None) -> int | None:
    """Measure the accuracy of a checkpoint or a model on datasets and benchmarks.

    Without config=FILE, data, model, sampling and correctness rule are those of the checkpoint's run. Settings that run
    code (the run's own reward file, trust_remote_code) or read the environment are not taken over: give them here, or
    give config=RUN/config.yaml to trust all of the run's settings.
    """
    with _loading_libraries():
        from cepo.commands.evaluate import evaluate_planned, planned

    plan = planned({name: value for name, value in options.items() if value is not None}, settings)
    if not dry_run:
        return evaluate_planned(plan)
    print_plain("\n".join(plan.lines()))
    return None


@cli.command(first_words=("checkpoint",), short_help="Measure the credit of methods against the truth.")
@click.option("--methods", required=True, help='For example "a, b(clip_radius=0.9, negative.select=random)".')
@click.option("--checkpoint", help="global_step_<N>, a model folder or a hub name; default: the configuration's model.")
@click.option("--data", help="Problems; default: data.train_files.")
@click.option(
    "--responses", type=click.IntRange(1), default=80, show_default=True, help="Number of responses measured."
)
@click.option("--tokens", type=click.IntRange(1), default=64, show_default=True, help="Tokens measured per response.")
@click.option(
    "--continuations",
    type=click.IntRange(0),
    default=32,
    show_default=True,
    help="Samples that continue each prefix; 0: only what the teachers know.",
)
@click.option("--out", help="New folder, or that of an interrupted measurement; default: credit/<checkpoint>.")
@click.option("--dry-run", is_flag=True, help="Sample the responses and count the continuations.")
@takes_settings
def credit(dry_run: bool, **options: Any) -> None:
    """Measure the credit of methods against the truth, which Monte-Carlo continuations estimate.

    Without config=FILE the configuration is that of the checkpoint's run, without its methods' settings.
    """
    with _loading_libraries():
        from cepo.commands.measure_credit import make_credit_plan, measure

    print_plain("\n".join(measure(make_credit_plan(**options), dry_run=dry_run)))


@cli.command(first_words=("checkpoint", "out"))
@click.option("--checkpoint", type=_FOLDER, required=True, help="global_step_<N>, or its subfolder actor.")
@click.option("--out", type=_FOLDER, required=True, help="New folder for the merged model.")
@click.option("--base", help="Model that training started from; default: the one in the run's config.yaml.")
@click.option("--chat-template", type=_FILE, help="Chat template of the run, if it is not its model's.")
@click.option("--config", type=_FILE, help="Configuration that you trust, such as RUN/config.yaml; default: see docs.")
@click.option("--dtype", type=click.Choice(("bf16", "fp16", "fp32")), help="Type of the weights; default: the base's.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the base model.")
@click.option("--upload", metavar="ORG/NAME", help="Upload the folder to the hub; a new repository is private.")
@click.option("--public", is_flag=True, help="With --upload: make a new repository public.")
def merge(**options: Any) -> None:
    """Export a checkpoint as a Hugging Face folder."""
    from cepo.commands.merge import merge_and_upload

    merge_and_upload(**options)


@cli.command(short_help="Copy the shipped configurations and examples.")
@click.argument("folder", type=click.Path(path_type=Path))
def init(folder: Path) -> None:
    """Copy the shipped configurations, templates, examples and launchers to the new FOLDER."""
    from cepo.commands.init import copy_shipped

    copied = ", ".join(copy_shipped(folder))
    print_plain(f"{folder}: {copied}. Next: cepo train config={folder}/configs/microgeo/base.yaml")


@cli.command("help")
@click.argument("names", nargs=-1, metavar="[COMMAND | SECTION | SETTING]...")
@click.pass_context
def help_(ctx: click.Context, names: Sequence[str]) -> None:
    """Explain commands, or list settings with their defaults."""
    from cepo.config.listing import settings_in_words

    for name in names or [""]:
        if name in cli.commands:
            with click.Context(cli.commands[name], info_name=name, parent=ctx.parent) as command_context:
                text = command_context.get_help()
        elif name:
            text = settings_in_words(name)
        else:
            assert ctx.parent is not None
            text = ctx.parent.get_help()
        sys.stdout.write(text + "\n")


def main(argv: Sequence[str] | None = None, command: click.Command = cli, program: str = "cepo") -> int:
    """Runs a command line and returns its exit code: 2 if it is wrong, 130 after Ctrl-C, 143 after SIGTERM."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with interrupts.handled():
        try:
            return command.main(arguments, prog_name=program, standalone_mode=False) or 0
        except click.Abort:
            sys.stderr.write(f"{' '.join([program, *arguments[:1]])}: interrupted\n")
            return interrupts.exit_code()
        except click.ClickException as error:
            error.show()
            return error.exit_code


def script() -> None:
    interrupts.exit_process(main())


if __name__ == "__main__":
    script()
