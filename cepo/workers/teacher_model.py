"""Loads the frozen model of a teacher that has weights of its own, `algorithm.teacher.model_path`."""

from __future__ import annotations

import dataclasses
from typing import Any

from cepo.algorithms import Estimator
from cepo.config.worker_schema import ActorConfig, LoraConfig, ModelConfig
from cepo.errors import ConfigError
from cepo.models.families import family_of
from cepo.models.patch_mask import patch_size_of
from cepo.models.pretrained import read_config, unreadable
from cepo.models.processing import Processing
from cepo.workers.building import build_scoring_model
from cepo.workers.scored_model import ScoredModel
from cepo.workers.scoring_model import ScoringModel

SECTION = "algorithm.teacher"
_REMEDY = "name a checkpoint whose tokenizer and images are the policy's, such as a larger model of its series"


class TeacherModel(ScoredModel[ActorConfig, ScoringModel]):
    """A frozen model that scores teachers' rows as the policy scores its own, in the policy's compute type.

    It has the policy's settings of passes, shards and offload. No checkpoint has its weights.
    """

    def __init__(
        self, path: str, actor: ActorConfig, processing: Processing, *, temperature: float, longest_row: int | None
    ) -> None:
        config = frozen_settings(actor, path)
        module = build_scoring_model(config, temperature=temperature, seed=0, frozen_section=SECTION)
        super().__init__(config, processing, module, longest_row=longest_row)


def frozen_settings(actor: ActorConfig, path: str) -> ActorConfig:
    """Returns the policy's settings for a model at `path` that is not trained: no adapter, no code of the model's own."""
    model = ModelConfig(
        model_path=path,
        fp32_logits=actor.model.fp32_logits,
        compile_layers=actor.model.compile_layers,
        enable_gradient_checkpointing=False,
        lora=LoraConfig(),
    )
    fsdp = dataclasses.replace(actor.fsdp, torch_dtype=actor.fsdp.mp_param_dtype)
    return dataclasses.replace(actor, model=model, fsdp=fsdp)


def require_fitting_teacher(estimator: Estimator, policy: ModelConfig, processing: Processing) -> None:
    """Raises `ConfigError` if the method's teacher is a model with other tokens or images than the `policy`'s."""
    path = estimator.teacher.model_path
    if path is not None:
        config = read_config(policy.model_path, trust_remote_code=policy.trust_remote_code)
        require_same_tokens(path, processing.tokenizer, config, distils=estimator.distilled_view is not None)


def require_same_tokens(path: str, tokenizer: Any, policy: Any, *, distils: bool) -> None:
    """Raises `ConfigError` unless the model at `path` reads the ids of `tokenizer`, and the images of the model `policy`.

    The teacher is shown token ids and pixels that were made for the policy. Ids are compared one by one, special tokens
    with the others, and of images the placeholder's id, the axes of positions and the side of patches.

    Args:
        policy: the policy's transformers configuration.
        distils: whether whole distributions are compared, for which both heads need as many rows.
    """
    from transformers import AutoTokenizer

    config: Any = read_config(path, trust_remote_code=False, section=SECTION)
    with unreadable(SECTION, path):
        own_tokenizer: Any = AutoTokenizer.from_pretrained(path)
    named = f"{SECTION}.model_path={path}"
    theirs, ours = _tokens_by_id(own_tokenizer), _tokens_by_id(tokenizer)
    all_ids = sorted(theirs.keys() | ours.keys())
    differing = [number for number in all_ids if theirs.get(number) != ours.get(number)]
    if differing:
        first = differing[0]
        raise ConfigError(
            f"{named} has another tokenizer than the policy: {len(differing)} of {len(ours)} ids differ, such as {first}, "
            f"which is {theirs.get(first)!a} there and {ours.get(first)!a} here; {_REMEDY}"
        )
    rows, own_rows = (part.get_text_config().vocab_size for part in (config, policy))
    if rows <= max(ours) or (distils and rows != own_rows):
        raise ConfigError(
            f"{named} has {rows} rows of tokens, and the policy {own_rows} with ids up to {max(ours)}; a method that distils "
            f"whole distributions needs as many. {_REMEDY}"
        )
    image_inputs, expected_inputs = _images_of(config), _images_of(policy)
    if image_inputs != expected_inputs:
        raise ConfigError(f"{named} reads images as {image_inputs}, and the policy as {expected_inputs}; {_REMEDY}")


def _tokens_by_id(tokenizer: Any) -> dict[int, tuple[str, bool]]:
    """Returns each token with whether it is special, by its id."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {number: (token, number in special) for token, number in tokenizer.get_vocab().items()}


def _images_of(config: Any) -> dict[str, int | None]:
    """Returns what images depend on in a model; for a text model only its axes of positions."""
    family = family_of(config, section=SECTION)
    axes: dict[str, int | None] = {"axes": family.num_position_axes}
    if not family.reads_images:
        return axes
    return axes | {"placeholder": family.placeholder_id(config), "patch": patch_size_of(config)}
