"""Reading a configuration: defaults, then the YAML file with its base files, then command-line arguments."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from cepo.algorithms import available_estimators, build_config, estimator_class, load_plugin
from cepo.config.easyr1 import (
    drop_empty_values,
    is_engine_key,
    refuse_engine_keys,
    refuse_unknown_engine_keys,
    report_engine_keys,
)
from cepo.config.easyr1_keys import EASYR1_KEYS
from cepo.config.options import has_default, rule_of
from cepo.config.paths import located, located_data, split_function
from cepo.config.private import environment_references, with_references, without_secrets
from cepo.config.replaced import refuse_replaced_keys
from cepo.config.schema import AlgorithmConfig, RunConfig
from cepo.config.sources import Origins, Source, read_arguments
from cepo.config.values import build_section, convert
from cepo.errors import ConfigError, did_you_mean

_METHODS = "methods"


def load_config(argv: Sequence[str], *, recorded: Source | None = None) -> RunConfig:
    """The run that a command line `config=FILE a.b.c=value ...` describes.

    A YAML file may name a file it builds on by a top-level key `base`, relative to its own folder. Lists replace, sections
    merge. `${a.b.c}` refers to another setting. Paths are relative to the working directory; shipped files (`configs/...`,
    `cepo/...`, `examples/...`) are found from any folder. Files of `trainer.plugins` are imported here, for the methods they
    register. `recorded` stands before all of them: what is taken from another run's record.

    Raises:
        ConfigError: unknown key, wrong type, value out of bounds, missing config file, or unknown method; the message
            begins with the file and line, or the argument, at fault.
    """
    sources = read_arguments(argv) if recorded is None else [recorded, *(read_arguments(argv) if argv else [])]
    origins = Origins()
    for source in sources:
        origins.update(source.origins)
    merged = _merged(sources)
    _load_plugins(merged, origins)
    refuse_replaced_keys(_plain_unresolved(merged), origins)
    estimators = available_estimators()
    for source in sources:
        _check_keys(source, estimators)
    tree = _resolved(merged, origins)
    refuse_engine_keys(tree, origins)
    drop_empty_values(tree)
    run = build_run(tree, origins)
    report_engine_keys(tree, origins)
    return dataclasses.replace(run, from_environment=environment_references(_plain_unresolved(merged)))


def build_run(tree: Mapping[str, Any], origins: Origins) -> RunConfig:
    """The typed run from a plain tree whose keys are known.

    Raises:
        ConfigError: as `load_config`.
    """
    run: RunConfig = build_section(RunConfig, tree, path="", origins=origins)
    sections = {name: tree["algorithm"][name] for name in _method_names(tree.get("algorithm", {}))}
    return _with_located_files(_with_methods(run, sections, origins))


def plain_tree(config: RunConfig) -> dict[str, Any]:
    """All settings as plain mappings, lists and values, under the keys they are written with."""
    tree = dataclasses.asdict(config)
    tree.pop("from_environment")
    methods = tree["algorithm"].pop(_METHODS)
    tree["algorithm"].update({name: _plain(section) for name, section in methods.items()})
    return tree


def dump_config(config: RunConfig) -> str:
    """All settings as YAML, defaults and method sections included; loading it again gives an equal `RunConfig`."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(plain_tree(config))))


def dump_for_record(config: RunConfig) -> str:
    """As `dump_config`, for files and trackers that others may read: what came from the environment stays a reference,
    and texts whose name says that they are secret (`api_key`, `token`, `password`, ...) are masked.
    """
    tree = without_secrets(_escaped(plain_tree(config)))
    return OmegaConf.to_yaml(OmegaConf.create(with_references(tree, config.from_environment)))


def _merged(sources: Sequence[Source]) -> DictConfig:
    """Defaults and sources in one tree, interpolations unresolved. A section left empty in a file keeps its defaults."""
    merged: Any = OmegaConf.create(_defaults(RunConfig))
    for source in sources:
        trimmed = _without_empty_sections(OmegaConf.to_container(source.tree), RunConfig)
        try:
            merged = OmegaConf.merge(merged, OmegaConf.create(trimmed))
        except (OmegaConfBaseException, ValueError, TypeError, AssertionError) as error:  # a mapping over a list
            place = next(iter(source.origins.places.values()), "config")
            raise ConfigError(f"{place}: cannot be combined with the settings before it: {error}") from error
    return merged


def _defaults(section: type[Any]) -> dict[str, Any]:
    """The defaults of a schema class as a plain tree, so that interpolations can refer to them."""
    hints = typing.get_type_hints(section)
    tree: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        if dataclasses.is_dataclass(hints[field.name]):
            tree[field.name] = _defaults(typing.cast("type[Any]", hints[field.name]))
        elif has_default(field) and not rule_of(field).internal:
            tree[field.name] = field.default if field.default is not dataclasses.MISSING else _made(field)
    return tree


def _made(field: dataclasses.Field[Any]) -> Any:
    assert field.default_factory is not dataclasses.MISSING
    return field.default_factory()


def _without_empty_sections(tree: Any, section: type[Any]) -> Any:
    """The tree without sections that are written with nothing below them."""
    if not isinstance(tree, Mapping):
        return tree
    hints: dict[str, Any] = {
        name: hint for name, hint in typing.get_type_hints(section).items() if dataclasses.is_dataclass(hint)
    }
    return {
        key: _without_empty_sections(value, hints[key]) if key in hints else value
        for key, value in tree.items()
        if not (value is None and key in hints)
    }


def _plain_unresolved(merged: DictConfig) -> Mapping[str, Any]:
    return typing.cast("Mapping[str, Any]", OmegaConf.to_container(merged))


def _resolved(merged: DictConfig, origins: Origins) -> dict[str, Any]:
    try:
        tree = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        key = error.full_key or ""
        raise origins.error(key, f"{key} is required and not set (??? marks a value to be filled in).") from None
    except OmegaConfBaseException as error:
        raise _unresolved(error, origins) from error
    assert isinstance(tree, dict)
    return typing.cast("dict[str, Any]", tree)


def _unresolved(error: OmegaConfBaseException, origins: Origins) -> ConfigError:
    key = error.full_key or ""
    first_line = str(error).splitlines()[0].rstrip(".")
    return origins.error(key, f"{key}: the reference cannot be resolved: {first_line}.")


def _load_plugins(merged: DictConfig, origins: Origins) -> None:
    """Import the files of `trainer.plugins`, so that the methods they register are known."""
    key = "trainer.plugins"
    try:
        trainer = merged.get("trainer")
        value = trainer.get("plugins") if isinstance(trainer, DictConfig) else []
        value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        raise _unresolved(error, origins) from error
    for path in convert(value, list[str], key=key, origins=origins):
        try:
            load_plugin(located(path))
        except ConfigError as error:
            raise origins.error(key, str(error)) from None
        except Exception as error:
            raise origins.error(key, f"{key}: importing {path} failed: {type(error).__name__}: {error}") from error


def _check_keys(source: Source, estimators: Sequence[str]) -> None:
    """Raise `ConfigError` for the first key of a source that nothing reads."""

    def check(tree: Any, section: type[Any], path: str) -> None:
        hints = typing.get_type_hints(section)
        known = [field.name for field in dataclasses.fields(section) if not rule_of(field).internal]
        if section is AlgorithmConfig:
            known += estimators
        for name, value in tree.items():
            key = f"{path}{name}"
            if is_engine_key(key):
                refuse_unknown_engine_keys(key, value, source.origins)
                continue
            if name not in known:
                raise source.origins.error(key, _unknown_key(str(name), path, known))
            if not dataclasses.is_dataclass(hints.get(name)) or value is None:
                continue
            if isinstance(value, str) and value.startswith("${"):
                continue
            if not isinstance(value, Mapping):
                raise source.origins.error(key, f"{key} must be a section with keys, got {value!r}.")
            check(value, typing.cast("type[Any]", hints[name]), f"{key}.")

    check(OmegaConf.to_container(source.tree), RunConfig, "")


def _unknown_key(name: str, path: str, known: Sequence[str]) -> str:
    beside = {key.removeprefix(path).partition(".")[0] for key in EASYR1_KEYS if key.startswith(path)}
    near = did_you_mean(name, [*known, *sorted(beside - set(known))])
    elsewhere = [key for key in [*known_keys(), *EASYR1_KEYS] if key.rpartition(".")[2] == name]
    if elsewhere:
        near = f" Did you mean '{elsewhere[0]}'?"
    where = f"under '{path[:-1]}'" if path else "at the top"
    return f"unknown key '{path}{name}'.{near} Known {where}: {', '.join(known)}."


def known_keys(section: type[Any] = RunConfig, path: str = "") -> list[str]:
    """All dotted keys of the schema, without the method sections."""
    hints = typing.get_type_hints(section)
    keys: list[str] = []
    for field in dataclasses.fields(section):
        key = f"{path}{field.name}"
        if dataclasses.is_dataclass(hints[field.name]):
            keys += known_keys(typing.cast("type[Any]", hints[field.name]), f"{key}.")
        elif not rule_of(field).internal:
            keys.append(key)
    return keys


def default_settings() -> dict[str, Any]:
    """The default of every dotted key of the schema that has one, without the method sections."""

    def below(tree: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
        for name, value in tree.items():
            if isinstance(value, dict) and f"{path}{name}" not in keys:
                yield from below(value, f"{path}{name}.")
            else:
                yield f"{path}{name}", value

    keys = set(known_keys())
    return dict(below(_defaults(RunConfig), ""))


def _method_names(algorithm: Any) -> list[str]:
    fields = {field.name for field in dataclasses.fields(AlgorithmConfig)}
    return [name for name in algorithm if name not in fields and not is_engine_key(f"algorithm.{name}")]


def _with_methods(run: RunConfig, sections: Mapping[str, Any], origins: Origins) -> RunConfig:
    """The run with the settings of the chosen method, and of every other one that has a section, in full."""
    chosen = run.algorithm.adv_estimator
    try:
        estimator_class(chosen)
    except ConfigError as error:
        raise origins.error("algorithm.adv_estimator", str(error)) from None
    methods: dict[str, Mapping[str, Any]] = {}
    for name in sorted({chosen, *sections}):
        shared = {own: getattr(run.algorithm, key) for key, own in estimator_class(name).shared_settings.items()}
        try:
            section = build_config(name, _over(shared, sections.get(name)))
            methods[name] = _plain(dataclasses.asdict(section))
        except ConfigError as error:
            raise origins.error(_key_named_in(str(error), f"algorithm.{name}", origins), str(error)) from None
    return dataclasses.replace(run, algorithm=dataclasses.replace(run.algorithm, methods=methods))


def _over(shared: Mapping[str, Any], section: Any) -> Any:
    """A method's section over the settings it shares with other methods; anything but a section is left to its reader."""
    return {**shared, **(section or {})} if section is None or isinstance(section, Mapping) else section


def _key_named_in(message: str, section: str, origins: Origins) -> str:
    """The key of a method's section that a message is about, to point at its line."""
    below = [key for key in origins.places if key.startswith(f"{section}.")]
    named = [key for key in below if key in message or key[len(section) + 1 :] in message.partition("Known")[0]]
    return max(named, key=len, default=section)


def _with_located_files(run: RunConfig) -> RunConfig:
    """The run with shipped files that the working directory does not have named by their location in the repository."""
    data, reward, trainer = run.data, run.worker.reward, run.trainer
    data = dataclasses.replace(
        data,
        train_files=",".join(map(located_data, data.train_sources)),
        val_files=data.val_files and located_data(data.val_files),
        image_dir=data.image_dir and located(data.image_dir),
        format_prompt=data.format_prompt and located(data.format_prompt),
        override_chat_template=data.override_chat_template and located(data.override_chat_template),
    )
    functions = [split_function(each) for each in reward.reward_functions]
    reward = dataclasses.replace(
        reward, reward_function=",".join(f"{located(file)}:{function}" for file, function in functions)
    )
    trainer = dataclasses.replace(trainer, plugins=[located(path) for path in trainer.plugins])
    methods = {name: _located_strings(section) for name, section in run.algorithm.methods.items()}
    return dataclasses.replace(
        run,
        data=data,
        algorithm=dataclasses.replace(run.algorithm, methods=methods),
        worker=dataclasses.replace(run.worker, reward=reward),
        trainer=trainer,
    )


def _located_strings(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _located_strings(entry) for key, entry in value.items()}
    return located(value) if isinstance(value, str) and value.startswith(("configs/", "examples/")) else value


def _plain(value: Any) -> Any:
    """The value with mappings as dicts and sequences as lists, as YAML would give it back."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def _escaped(value: Any) -> Any:
    """The value with `${` protected, so that resolved text is not taken for a reference when it is loaded again."""
    if isinstance(value, Mapping):
        return {key: _escaped(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_escaped(entry) for entry in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value
