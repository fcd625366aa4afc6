"""Reads the settings that a run has recorded in its `config.yaml`.

A run folder may have been downloaded. What such a record may decide is the list in this module: keys of columns, lengths,
sizes, sampling, and a reward that computes and does nothing else, with numbers of usual size. Everything that could open
a host, a file, a model or a program needs the command line, or a configuration that the user names.

A record that a run of this user's has written (`cepo.run_folder.own_records`) may decide more: it repeats what he has chosen
himself. References to the environment, remote code and other reward files need his word even there.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cepo.config.easyr1 import EASYR1_KEYS
from cepo.config.paths import (
    MICROGEO_DATA,
    MICROGEO_MODELS,
    PACKAGE_FOLDER,
    SHIPPED_FOLDER,
    find_path,
    split_function,
    without_user,
)
from cepo.config.record import without_interpolation
from cepo.config.schema import RunSettings
from cepo.config.sources import Origins, Source, read_file
from cepo.config.worker_schema import parts_of
from cepo.errors import ConfigError, DataError
from cepo.files.safe_files import read_text, require_within
from cepo.files.trees import Fields, Tree, is_dict, is_list, leaves, nested, texts_of
from cepo.run_folder.own_records import is_own_record
from cepo.sections.reader import default_tree

logger = logging.getLogger(__name__)

MODEL = "worker.actor.model"
CHAT_TEMPLATE, FORMAT_PROMPT = "data.override_chat_template", "data.format_prompt"
TRAIN_FILES, VAL_FILES = "data.train_files", "data.val_files"
_MODEL_PATH, _REMOTE_CODE = f"{MODEL}.model_path", f"{MODEL}.trust_remote_code"
_REWARD, _ANSWER = "worker.reward.reward_function", "worker.reward.answer_function"
_KEYWORDS = "worker.reward.reward_function_kwargs"
EVALUATED = (
    "data",
    MODEL,
    "worker.rollout",
    _REWARD,
    _KEYWORDS,
    "worker.reward.reward_weights",
    _ANSWER,
    "worker.reward.skip_special_tokens",
    "worker.reward.timeout_seconds",
    "algorithm.correct_key",
    "algorithm.correct_threshold",
)
"""The settings that an evaluation reads, by their sections."""
TRAINED = ("worker.actor",)
"""The further section that a measurement of credit reads."""
_INTERPOLATION = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
"""Matches `${` after an even number of backslashes; after an odd number it is text."""


def _keys(section: str, names: str) -> set[str]:
    return {f"{section}.{name}" for name in names.split()}


LISTED = frozenset(
    _keys(
        "data",
        """
        prompt_key answer_key solution_key image_key image_marks teacher_image_key video_key video_fps
        max_prompt_length max_response_length min_pixels max_pixels filter_overlong_prompts skip_bad_rows
        train_weights rollout_batch_size mini_rollout_batch_size val_batch_size shuffle seed
        """,
    )
    | _keys("algorithm", "correct_key correct_threshold")
    | _keys("worker.reward", "reward_weights skip_special_tokens timeout_seconds")
    | _keys(
        "worker.rollout",
        """
        name n temperature top_p top_k seed dtype gpu_memory_utilization enforce_eager sleep limit_images max_model_len
        max_num_batched_tokens max_num_seqs merge_lora ignore_eos disable_tqdm tensor_parallel_size quantization
        """,
    )
    | _keys(
        "worker.rollout.speculative_config",
        """
        method num_speculative_tokens prompt_lookup_min prompt_lookup_max suffix_decoding_max_tree_depth
        suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob
        """,
    )
    | _keys("worker.rollout.val_override_config", "n temperature top_p top_k presence_penalty")
    | _keys(
        MODEL,
        """
        enable_gradient_checkpointing compile_layers freeze_vision_tower fp32_logits
        lora.rank lora.alpha lora.use_dora lora.quantization lora.double_quantization
        """,
    )
    | _keys(
        "worker.actor",
        """
        micro_batch_size_per_device_for_update micro_batch_size_per_device_for_experience dynamic_batching max_grad_norm
        loss_avg_mode ppo_epochs global_batch_size padding_free clip_ratio_low clip_ratio_high clip_ratio_dual loss_type
        entropy_coef entropy_coef_final entropy_coef_steps rollout_is rollout_is_threshold tau_positive tau_negative
        optim.lr optim.betas optim.weight_decay optim.strategy optim.lr_warmup_ratio optim.lr_warmup_steps
        optim.min_lr_ratio optim.lr_scheduler_type
        fsdp.torch_dtype fsdp.mp_param_dtype fsdp.mp_reduce_dtype fsdp.enable_full_shard fsdp.enable_cpu_offload
        fsdp.enable_rank0_init fsdp.fsdp_size offload.offload_params offload.offload_optimizer
        """,
    )
)
"""The settings that any record may decide; the schema checks their types and bounds."""

LISTED_REWARDS: dict[str, frozenset[str]] = {
    "cepo/rewards/math.py": frozenset({"format_weight"}),
    "examples/reward_function/math.py": frozenset({"format_weight"}),
    "examples/reward_function/r1v.py": frozenset({"format_weight"}),
    "examples/reward_function/dapo.py": frozenset(
        {"max_response_length", "overlong_buffer_length", "overlong_penalty_factor"}
    ),
    "examples/reward_function/rounded.py": frozenset(),
}
"""The reward files that any record may choose, which open no host and no file, with the keywords that take numbers."""
_REWARD_NAME = "compute_score"
_QUESTION = re.compile(r"\{\{-?\s*content\s*(\|\s*trim\s*)?-?\}\}")
_STATEMENT = re.compile(r"\{[{%#]")
_MODULE_NAMES = re.compile(r"[A-Za-z0-9_., -]+")
_LARGEST = {
    "min_pixels": 64_000_000,  # the most pixels of an image file: a record cannot ask to enlarge images beyond it
    "max_pixels": 64_000_000,
    "video_fps": 1_000,
    "n": 1_024,
    "rank": 65_536,
    "tensor_parallel_size": 1_024,
    "max_prompt_length": 10_000_000,
    "max_response_length": 10_000_000,
    "max_model_len": 10_000_000,
    "max_num_seqs": 1_000_000,
    "val_batch_size": 1_000_000,
    "timeout_seconds": 86_400,
    "seed": 2**63 - 1,
}
_LONGEST_TEXT = 10_000
_LARGEST_NUMBER = 10**9
"""The largest numbers that a stranger's record may decide: larger ones would fill the memory, or never end."""


@dataclass(frozen=True)
class Record:
    """The settings that a `config.yaml` decides, by dotted key, with their places in the file.

    Attributes:
        everything: the settings that were asked for, as they stand in the file.
        settings: those of them that the record may decide.
        refused: those that differ from the defaults and that it may not decide.
    """

    file: Path
    everything: Fields
    settings: Tree
    origins: Origins
    is_own: bool
    refused: Fields


def read_record(file: Path, given: Collection[str], sections: Collection[str] = EVALUATED) -> Record:
    """Returns what a run's record may decide of `sections`, without the keys `given` elsewhere.

    Raises `ConfigError` if the file cannot be read, or if a setting is a reference, which may read the environment.
    """
    source, _ = read_file(file, within=file.parent)
    own = is_own_record(file)
    taken = {
        key: value
        for key, value in leaves(source.tree, whole=EASYR1_KEYS)
        if _below(key, sections) and not _below(key, given)
    }
    place_of = source.origins.place_of
    if taken.pop(_REMOTE_CODE, False):
        logger.warning(
            f"{place_of(_REMOTE_CODE)}: {_REMOTE_CODE} is not taken from a run's own record; if you trust it, set it yourself"
        )
    for key, value in taken.items():
        if any(map(_INTERPOLATION.search, texts_of(value))):
            raise ConfigError(
                f"{place_of(key)}: {key} refers to {value!r}, and references of a run's own record are not followed, since "
                f"they may read the environment; give {key}=..."
            )
    if own:
        return Record(file, taken, taken, source.origins, is_own=True, refused={})
    single = {name: leaf for key, value in taken.items() for name, leaf in leaves(value, key)}
    accepted = dict(_accepted(single))
    refused = {key: value for key, value in single.items() if key not in accepted and not _is_default(key, value)}
    return Record(file, taken, accepted, source.origins, is_own=False, refused=refused)


def recorded_for_evaluation(
    file: Path, given: Collection[str], *, also: Collection[str] = (), without_data: Collection[str] = ()
) -> Source:
    """Returns data, model, sampling and verdict settings of a run's `config.yaml`, without the keys `given` elsewhere.

    `also` are further sections to read. The data sets of the keys `without_data` are not read by the command. Raises
    `ConfigError` if the record names what it may not decide, if it has a reference, or if it names a chat template or a
    format prompt outside the run folder.
    """
    record = read_record(file, given, (*EVALUATED, *also))
    for key in (CHAT_TEMPLATE, FORMAT_PROMPT):
        _require_file_of_run(record.settings, key, file, f"{key}=")
    if record.is_own:
        _require_shipped_functions(record)
        return Source(nested(record.settings), record.origins)
    _require_plain_prompt(record)
    refused = {key: value for key, value in record.refused.items() if key not in without_data}
    if refused:
        raise ConfigError(_refusal(record, refused))
    settings = dict(record.settings)
    if TRAIN_FILES in without_data and not _below(TRAIN_FILES, given):
        settings[TRAIN_FILES] = MICROGEO_DATA[0]  # the schema needs one; the command reads other data
    return Source(nested(settings), record.origins)


def recorded_model(
    file: Path, given: Collection[str], *, named: Fields | None = None, trusted: bool = False
) -> tuple[Fields, str | None]:
    """Returns the run's `worker.actor.model`, without `trust_remote_code`, and the file of its chat template.

    `named` are entries of `worker.actor.model` that the user has named elsewhere: a stranger's record may repeat them.
    With `trusted`, the user has named the file itself. Raises `ConfigError` as `recorded_for_evaluation`.
    """
    record = read_record(file, given, (MODEL, CHAT_TEMPLATE))
    entries = record.everything
    of_model = {key.removeprefix(f"{MODEL}."): value for key, value in entries.items() if key.startswith(f"{MODEL}.")}
    model = without_interpolation(nested(of_model))
    if not model:
        raise ConfigError(f"{file} is not the configuration of a run: {MODEL} is not a section")
    template = entries.get(CHAT_TEMPLATE)
    if trusted:
        return model, without_interpolation(template)
    known = named or {}
    decisive = ("model_path", "tokenizer_path", "override_config")
    repeated = {name for name in decisive if name in known and known[name] == model.get(name)}
    strange = {
        key: value
        for key, value in record.refused.items()
        if _below(key, [f"{MODEL}.{name}" for name in decisive if name not in repeated])
    }
    if strange:
        raise ConfigError(_refusal(record, strange))
    _require_file_of_run(entries, CHAT_TEMPLATE, file, "--chat-template ")
    return model, without_interpolation(template)


def _accepted(taken: Fields) -> Iterator[tuple[str, object]]:
    """Yields the settings that a stranger's record may decide."""
    functions = _listed_functions(taken.get(_REWARD))
    for key, value in taken.items():
        if key == _REWARD and functions is not None:
            yield key, ",".join(functions.values())
        elif _may_decide(key, value, functions):
            yield key, value


def _may_decide(key: str, value: object, functions: Mapping[str, str] | None) -> bool:
    """Returns whether a stranger's record may decide a setting, if it chooses these reward functions."""
    if key.startswith(f"{_KEYWORDS}."):
        return functions is not None and _is_listed_keyword(key.removeprefix(f"{_KEYWORDS}."), value, functions)
    if key in LISTED:
        number = _number(value)
        if number is None:
            return not isinstance(value, str) or len(value) <= _LONGEST_TEXT
        return abs(number) <= _LARGEST.get(key.rpartition(".")[2], _LARGEST_NUMBER)
    if key in (CHAT_TEMPLATE, FORMAT_PROMPT):
        return value is not None  # `_require_file_of_run` decides
    if key == f"{MODEL}.lora.target_modules":
        return isinstance(value, str) and len(value) <= _LONGEST_TEXT and _MODULE_NAMES.fullmatch(value) is not None
    shipped = {TRAIN_FILES: MICROGEO_DATA, VAL_FILES: MICROGEO_DATA, _MODEL_PATH: MICROGEO_MODELS}
    return value in shipped.get(key, ())


def _number(value: object) -> float | None:
    """Returns the number that a setting is read as, which may stand in the file as a text; None if it is none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, str | float):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return math.inf if math.isnan(number) else number


def _listed_functions(value: object) -> dict[str, str] | None:
    """Returns the recorded reward functions, by listed file, as this installation's own; None if another is among them.

    A record has the paths of the machine that wrote it, so that a file is recognised by the end of its path.
    """
    names = value if is_list(value) else parts_of(str(value))
    functions: dict[str, str] = {}
    for name in names:
        path, function = split_function(str(name))
        listed = next((file for file in LISTED_REWARDS if f"/{path}".endswith(f"/{file}")), None)
        if listed is None or function != _REWARD_NAME or listed in functions:
            return None
        around = PACKAGE_FOLDER.parent if listed.startswith("cepo/") else SHIPPED_FOLDER
        functions[listed] = f"{around / listed}:{function}"
    return functions


def _is_listed_keyword(name: str, value: object, functions: Fields) -> bool:
    """Returns whether a keyword, with several functions below the name of its function's file, is a listed number."""
    number = _number(value)
    if not isinstance(value, bool | int | float) or (number is not None and not abs(number) <= _LARGEST_NUMBER):
        return False
    if len(functions) == 1:
        return name in LISTED_REWARDS[next(iter(functions))]
    return any(name in {f"{Path(file).stem}.{each}" for each in LISTED_REWARDS[file]} for file in functions)


def _is_default(key: str, value: object) -> bool:
    """Returns whether a setting says no more than its default, or nothing."""
    if value == {}:
        return True
    node: object = default_tree(RunSettings)
    for name in key.split("."):
        if not is_dict(node) or name not in node:
            return value is None or value == []
        node = node[name]
    return value == node and type(value) is type(node)


def _refusal(record: Record, refused: Fields) -> str:
    lines = [
        f"{record.origins.place_of(key)}: {key} is {str(without_interpolation(value))[:200]!r}"
        for key, value in refused.items()
    ]
    arguments = ", ".join(dict.fromkeys(_remedy(key) for key in refused))
    return (
        f"{record.file} was not recorded by a run of yours, and the record of a stranger decides no host, file, data, model, "
        f"tokenizer, program or huge number: give {arguments} yourself, or the whole file as config={record.file} (cepo merge: "
        "--config) if you trust it. It has:\n" + "\n".join(lines)
    )


def _remedy(key: str) -> str:
    """Returns the argument that repeats a setting."""
    for section in (_KEYWORDS, f"{MODEL}.override_config"):
        if key.startswith(section):
            return f"{section}=..."
    return {VAL_FILES: "data=...", TRAIN_FILES: "data=...", _MODEL_PATH: f"{_MODEL_PATH}=... (cepo merge: --base)"}.get(
        key, f"{key}=..."
    )


def _require_shipped_functions(record: Record) -> None:
    for key in (_REWARD, _ANSWER):
        value = record.settings.get(key)
        names = [] if value is None else value if is_list(value) else parts_of(str(value))
        for name in map(str, names):
            if not _is_shipped(split_function(name)[0]):
                raise ConfigError(
                    f"{record.origins.place_of(key)}: the run was rewarded by {name}, a file that is not part of cepo and "
                    f"would run here. If you trust it, give {key}={name}, or config={record.file} for the whole configuration"
                )


def _require_file_of_run(settings: Fields, key: str, file: Path, remedy: str) -> None:
    """Refuses a file outside the run folder, unless it is part of cepo: a record could expose any of this machine."""
    name = settings.get(key)
    if name is None or _is_shipped(str(name)):
        return
    try:
        require_within(without_user(str(name)), file.parent)
    except DataError as error:
        raise ConfigError(
            f"{file}: {key} is {name}, which is not in the run's folder. If you trust that record, give {remedy}{name}"
        ) from error


def _require_plain_prompt(record: Record) -> None:
    """Refuses a stranger's format prompt that is more than a text around the question: a template is a program."""
    name = record.settings.get(FORMAT_PROMPT)
    if name is None or _is_shipped(str(name)):
        return
    try:
        text = read_text(without_user(str(name)), within=record.file.parent)
    except DataError as error:
        raise ConfigError(f"{record.file}: {FORMAT_PROMPT}: {error}") from error
    if _STATEMENT.search(_QUESTION.sub("", text)):
        raise ConfigError(
            f"{record.file}: {FORMAT_PROMPT} is {name}, a template with more than {{{{ content }}}}, which has no limit of time. "
            f"If you trust it, give {FORMAT_PROMPT}={name}"
        )


def _below(key: str, sections: Collection[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _is_shipped(file: str) -> bool:
    path = find_path(file)
    folders = (PACKAGE_FOLDER, SHIPPED_FOLDER / "configs", SHIPPED_FOLDER / "examples")
    return path is not None and any(path.resolve().is_relative_to(folder.resolve()) for folder in folders)
