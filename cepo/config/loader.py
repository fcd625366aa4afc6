"""Loads a configuration: defaults, then the YAML file with its base files, then command-line arguments."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from cepo.algorithms import available_estimators, estimator_class, load_plugin, section_of
from cepo.algorithms.registry import METHODS, path_of
from cepo.config.easyr1 import report_engine_keys, without_engine_keys
from cepo.config.listing import all_settings
from cepo.config.other_programs import translation_of
from cepo.config.paths import located
from cepo.config.schema import RunConfig, RunSettings, TrainerConfig
from cepo.config.sources import Origins, Source, read_arguments
from cepo.config.unknown_keys import require_known_keys, what_to_write
from cepo.config.worker_schema import WorkerConfig
from cepo.errors import ConfigError, did_you_mean, place_in
from cepo.files.trees import Fields, Tree, is_dict, is_mapping, leaves, texts_of, with_texts
from cepo.losses import available_losses, loss_class
from cepo.losses.registry import LOSSES
from cepo.losses.registry import section_of as loss_section
from cepo.sections.fields import fields_of
from cepo.sections.reader import default_tree, merged_trees
from cepo.terminal import interrupts

logger = logging.getLogger(__name__)

_Keys = tuple[str, ...]
_ENVIRONMENT = re.compile(r"(?<!\\)\$\{\s*oc\.env\b")
_HIDDEN = "\ue000{"
"""Stands for the beginning of a reference that is not to be resolved."""
_ONE_MACHINE: Tree = {"fsdp": {"fsdp_size": "${trainer.n_gpus_per_node}"}}
# Runs with another trainer.seed alone would otherwise see the same rows and, at first, the same responses. Weights that
# are sharded over machines would be gathered by the network between them, for each block in each pass.
_DEFAULTS_FROM_OTHER_SETTINGS: Tree = {
    "data": {"seed": "${trainer.seed}"},
    "worker": {"rollout": {"seed": "${trainer.seed}"}, "actor": _ONE_MACHINE, "critic": _ONE_MACHINE},
}


def load_config(argv: Sequence[str], *, recorded: Source | None = None) -> RunConfig:
    """Returns the run that a command line `config=FILE a.b.c=value ...` describes.

    A YAML file may extend another file, named by the top-level key `base` relative to its own folder. Lists are
    replaced, sections merged. `${a.b.c}` refers to another setting. Paths are relative to the working directory;
    shipped files (`configs/...`, `cepo/...`, `examples/...`) are found from any folder. The files of `trainer.plugins`
    are imported for the methods and losses they register. All other sources override `recorded`, the settings of a record.

    Raises:
        ConfigError: unknown key, wrong type, value out of bounds, missing config file, unknown method or loss; the message
            begins with the file and line, or the argument, at fault.
    """
    sources: list[Source] = []
    if recorded is not None:
        sources.append(recorded)
    if argv or recorded is None:
        sources += read_arguments(argv, what_to_write)
    origins = Origins()
    for source in sources:
        origins.update(source.origins)
    defaults = merged_trees(default_tree(RunSettings), _DEFAULTS_FROM_OTHER_SETTINGS)
    merged = _merged(sources, defaults)
    settings = _parsed(merged, origins)
    with interrupts.loading():
        _load_plugins(settings, origins)
    presets = _presets(settings, origins)
    require_known_keys(merged, origins)
    if presets:
        merged = _merged(sources, merged_trees(defaults, presets))
        settings = _parsed(merged, origins)
    resolved = _resolved(settings, origins)
    _refuse_none(resolved, origins)
    _require_rank_of_lora(resolved, origins)
    _leave_out_validation(resolved, origins)
    _fit_optimizer_batch(resolved, origins)
    tree, without_effect = without_engine_keys(resolved, origins)
    run = _read_run(tree, origins)
    report_engine_keys(without_effect, origins)
    return dataclasses.replace(
        run,
        from_environment=_environment_references(merged),
        set_with_method=_set_with_method(sources, defaults, origins),
    )


def _refuse_none(tree: Tree, origins: Origins) -> None:
    """Refuses Python's None, which YAML reads as a text, where a setting may be null."""
    for key, value in leaves(tree):
        if value == "None" and _may_be_null(key):
            raise origins.error(key, f"{key} is the text 'None'. Write {key}=null for no value.")


def _may_be_null(key: str) -> bool:
    return any(setting.key == key and setting.accepted == "text or null" for setting in all_settings())


def _require_rank_of_lora(tree: Tree, origins: Origins) -> None:
    """Refuses settings of LoRA whose user left the rank at 0, by the default or by a file, which trains all weights."""
    section = "worker.actor.model.lora"
    rank_key = f"{section}.rank"
    if tree["worker"]["actor"]["model"]["lora"].get("rank") != 0 or rank_key in origins.arguments:
        return
    places = origins.arguments if rank_key in origins.places else origins.places
    without_rank = [key for key in places if key.startswith(f"{section}.")]
    if without_rank:
        key = without_rank[0]
        raise origins.error(
            key,
            f"{key} is set, and {rank_key} is 0, so all weights would be trained. Set {rank_key}=16 for an adapter, or "
            f"{rank_key}=0 beside it if all weights shall be trained.",
        )


def _leave_out_validation(tree: Tree, origins: Origins) -> None:
    """Turns validation off where `data.val_files` is null, unless the user asks for it beside that.

    What a file asks for ends with `data.val_files=null`, and what is a default with a null that is one too.
    """
    if tree["data"].get("val_files") is not None:
        return
    asked_for = origins.arguments if "data.val_files" in origins.places else origins.places
    for name, off in (("val_before_train", False), ("val_freq", -1)):
        if f"trainer.{name}" not in asked_for:
            tree["trainer"][name] = off


def _set_with_method(sources: Sequence[Source], defaults: Tree, origins: Origins) -> dict[str, tuple[object, object]]:
    """Returns what the file that chose the method changes in `data` and `worker` of its base file.

    A comparison with another method is fair only if that one gets the same values.
    """
    choosing = [source for source in sources if "algorithm.adv_estimator" in source.origins.places]
    if not choosing or choosing[-1] is sources[0]:
        return {}
    file = choosing[-1]
    sources_before = sources[: sources.index(file)]
    tree_before = dict(leaves(_merged(sources_before, defaults)))
    changed: dict[str, tuple[object, object]] = {}
    for key, value in leaves(file.tree):
        place = file.origins.places.get(key)
        still_holds = origins.places.get(key) == place
        if not key.startswith(("data.", "worker.")) or not still_holds:
            continue
        if key in tree_before and tree_before[key] != value:
            changed[key] = (value, tree_before[key])
    return changed


def _fit_optimizer_batch(tree: Tree, origins: Origins) -> None:
    """Lowers `worker.actor.global_batch_size` to `data.rollout_batch_size` where the user has chosen only the latter.

    That is where the former is a default, or stands in a file and the latter among the arguments.
    """
    rollout_key, update_key = "data.rollout_batch_size", "worker.actor.global_batch_size"
    actor = tree["worker"]["actor"]
    rollout_size = tree["data"].get("rollout_batch_size")
    update_size = actor.get("global_batch_size")
    if not isinstance(rollout_size, int) or not isinstance(update_size, int) or update_size <= rollout_size:
        return
    is_default = update_key not in origins.places
    is_overridden = rollout_key in origins.arguments and update_key not in origins.arguments
    if is_default or is_overridden:
        actor["global_batch_size"] = rollout_size
    if is_overridden and not is_default:
        logger.info(
            "%s=%d (%s) is lowered to %s=%d",
            update_key, update_size, origins.place_of(update_key), rollout_key, rollout_size,
        )  # fmt: skip


def _presets(settings: DictConfig, origins: Origins) -> Tree:
    """Returns the defaults of the chosen method and of the chosen policy loss, in their sections."""
    presets: Tree = {}
    method = str(_selected(settings, "algorithm.adv_estimator", origins))
    try:
        of_method = METHODS.presets_of(method)
    except ConfigError as error:
        raise _unknown_name("algorithm.adv_estimator", method, error, origins) from None
    if of_method:
        presets["algorithm"] = of_method
    loss = str(_selected(settings, "worker.actor.loss_type", origins))
    try:
        of_loss = LOSSES.presets_of(loss)
    except ConfigError as error:
        raise _unknown_name("worker.actor.loss_type", loss, error, origins) from None
    if of_loss:
        presets["worker"] = {"actor": of_loss}
    return presets


def _unknown_name(key: str, name: str, error: ConfigError, origins: Origins) -> ConfigError:
    """Returns the error about an unknown method or loss; a name of another program leads to our settings."""
    translation = translation_of(key, name)
    if translation is not None:
        return origins.error(key, f"{key} '{name}' is unknown. {translation}")
    return origins.error(key, str(error))


def _read_run(tree: Tree, origins: Origins) -> RunConfig:
    algorithm = with_texts(tree["algorithm"], _located_shipped)
    tree["algorithm"] = algorithm
    written_sections: Tree = {}
    for name in available_estimators():
        if name in algorithm:
            written_sections[name] = _method_section(name, algorithm.pop(name), origins)
    settings = origins.read(RunSettings, tree)
    shared = dataclasses.asdict(settings.algorithm)
    methods: dict[str, Tree] = {}
    for name in sorted({settings.algorithm.adv_estimator, *written_sections}):
        section = section_of(name, {**shared, name: written_sections.get(name)})
        method_config = origins.read(estimator_class(name).Config, section, path=path_of(name))
        methods[name] = dataclasses.asdict(method_config)
    parts = {field: getattr(settings, field) for field in fields_of(RunSettings)}
    parts["worker"] = _with_losses(settings.worker, origins)
    return RunConfig(**parts, methods=methods)


def _method_section(name: str, section: object, origins: Origins) -> object:
    """Returns the section `algorithm.<name>`, which may be empty; raises `ConfigError` for a value in its place."""
    if section and not is_mapping(section):
        path = f"algorithm.{name}"
        raise origins.error(path, f"{path} must be a section with keys, got {section!r}.")
    return section


def _located_shipped(text: str) -> str:
    return located(text) if text.startswith(("configs/", "examples/")) else text


def _with_losses(worker: WorkerConfig, origins: Origins) -> WorkerConfig:
    """Checks the chosen policy loss and `worker.actor.loss.*`, and returns the section with the losses' own defaults."""
    actor = worker.actor
    values = vars(actor)
    own_settings: dict[str, Tree] = {}
    for name in sorted({actor.loss_type, *actor.loss}):
        path = f"worker.actor.loss.{name}"
        known_losses = available_losses()
        if name not in known_losses:
            near = did_you_mean(name, known_losses)
            raise origins.error(
                path, f"unknown key '{path}': no policy loss has this name.{near} Known: {', '.join(known_losses)}"
            )
        own_fields = LOSSES.own_fields(name)
        for key in actor.loss.get(name, {}):
            if key not in own_fields:
                shared = f" Write worker.actor.{key}." if key in LOSSES.shared else did_you_mean(key, own_fields)
                known = f" Known under {path}: {', '.join(own_fields) or 'nothing'}."
                raise origins.error(f"{path}.{key}", f"unknown key '{path}.{key}'.{shared}{known}")
        config = dataclasses.asdict(origins.read(loss_class(name).Config, loss_section(name, values), path=path))
        if own_fields:
            own_settings[name] = {key: config[key] for key in own_fields}
    if own_settings == actor.loss:
        return worker
    return dataclasses.replace(worker, actor=dataclasses.replace(actor, loss=own_settings))


def _merged(sources: Sequence[Source], defaults: Tree) -> Tree:
    """Merges defaults and sources, with interpolations unresolved. A section left empty keeps its defaults."""
    merged = defaults
    for source in sources:
        merged = merged_trees(merged, _without_empty_sections(source.tree, defaults, source.origins))
    return merged


def _without_empty_sections(tree: Fields, defaults: Fields, origins: Origins, path: str = "") -> Tree:
    """Removes empty sections; raises `ConfigError` for a value in place of a section."""
    result: Tree = {}
    for key, value in tree.items():
        section = defaults.get(key)
        dotted_key = f"{path}{key}"
        is_reference = isinstance(value, str) and value.startswith("${")
        if not is_dict(section) or not section or is_reference:
            result[key] = value
        elif is_mapping(value):
            result[key] = _without_empty_sections(value, section, origins, f"{dotted_key}.")
        elif value is not None:
            raise origins.error(dotted_key, f"{dotted_key} must be a section with keys, got {value!r}.")
    return result


def _parsed(merged: Tree, origins: Origins) -> DictConfig:
    """Returns the settings with their references read, but not followed."""
    try:
        return OmegaConf.create(merged)
    except OmegaConfBaseException as error:
        raise _unresolved(error, origins) from error


def _resolved(settings: DictConfig, origins: Origins) -> Tree:
    try:
        tree = OmegaConf.to_container(settings, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        key = error.full_key or ""
        raise origins.error(key, f"{key} is required and not set (??? marks a value to be filled in).") from None
    except OmegaConfBaseException as error:
        raise _unresolved(error, origins) from error
    return cast("Tree", tree)


def _unresolved(error: OmegaConfBaseException, origins: Origins) -> ConfigError:
    key = error.full_key or ""
    first_line = str(error).splitlines()[0].rstrip(".")
    return origins.error(
        key,
        f"{key}: the reference cannot be resolved: {first_line}. ${{a.b.c}} refers to a setting, ${{oc.env:NAME}} to a "
        "variable of the environment.",
    )


def _selected(settings: DictConfig, key: str, origins: Origins) -> Any:
    try:
        value = OmegaConf.select(settings, key)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        raise _unresolved(error, origins) from error


def _load_plugins(settings: DictConfig, origins: Origins) -> None:
    """Imports the files of `trainer.plugins`, so that the methods and losses they register are known."""
    key = "trainer.plugins"
    value = _selected(settings, key, origins)
    for path in origins.read(TrainerConfig, {"plugins": value}, path="trainer").plugins:
        try:
            if not load_plugin(path):
                logger.warning(
                    '%s: %s registers no method and no loss; decorate its class with @register_estimator("name") or '
                    '@register_loss("name")',
                    key,
                    path,
                )
        except ConfigError as error:
            raise origins.error(key, str(error)) from None
        except (Exception, SystemExit) as error:
            where = place_in(error, [path]) or path
            raise origins.error(key, f"{key}: importing {where} failed: {type(error).__name__}: {error}") from error


def _environment_references(merged: Tree) -> dict[_Keys, object]:
    """Returns the settings that take text from the environment, directly or through other settings.

    The result maps each setting's path to its text or list with the references to the environment unresolved.
    """
    if not any(_ENVIRONMENT.search(text) for text in texts_of(merged)):
        return {}
    hidden = with_texts(merged, _with_hidden_references)
    tree = cast("Tree", OmegaConf.to_container(OmegaConf.create(hidden), resolve=True))
    from_environment: dict[_Keys, object] = {}
    for path, value in _leaves(tree, ()):
        if any(_HIDDEN in text for text in texts_of(value)):
            from_environment[path] = with_texts(value, _with_shown_references)
    return from_environment


def _with_hidden_references(text: str) -> str:
    return text.replace("${", _HIDDEN) if _ENVIRONMENT.search(text) else text


def _with_shown_references(text: str) -> str:
    return text.replace(_HIDDEN, "${")


def _leaves(tree: Mapping[str, object], path: _Keys) -> Iterator[tuple[_Keys, object]]:
    for key, value in tree.items():
        path_of_value = (*path, str(key))
        if is_mapping(value):
            yield from _leaves(value, path_of_value)
        else:
            yield path_of_value, value
