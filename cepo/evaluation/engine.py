"""Builds the rollout engine of an evaluation and loads a checkpoint's weights into it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from cepo.config import RunConfig
from cepo.errors import CheckpointError
from cepo.leftovers import OwnFolder
from cepo.models.processing import Processing
from cepo.models.quantization import read_quantization
from cepo.rollout.factory import build_generator, settings_of_run
from cepo.rollout.generator import AdapterWeights, Generator
from cepo.workers.checkpoint import ADAPTER
from cepo.workers.distributed import this_device
from cepo.workers.merged_model import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BaseModel, merge_checkpoint


@contextlib.contextmanager
def engine(
    config: RunConfig, processing: Processing, actor: Path | None, most_visuals: tuple[int, int]
) -> Iterator[Generator]:
    """Yields a generator with the weights of a checkpoint's `actor` folder; without one, with the model's own.

    Raises:
        ConfigError, CheckpointError, EngineError: model or checkpoint cannot be loaded.
    """
    adapter = None if actor is None else _adapter(actor)
    with contextlib.ExitStack() as stack:
        of_run = settings_of_run(config, most_visuals=most_visuals)
        settings = dataclasses.replace(
            of_run,
            model_path=of_run.model_path if actor is None or adapter is not None else _merged(actor, config, stack),
            lora_rank=0 if adapter is None else int(str(adapter.adapter_config["r"])),
            max_num_batched_tokens=max(config.worker.rollout.max_num_batched_tokens, of_run.max_model_len),
            tensor_parallel_size=1,
            show_progress=False,  # the command draws a bar over problems
        )
        generator = build_generator(settings, processing, device=this_device().type)
        stack.callback(generator.close)
        if adapter is not None:
            generator.sync_weights(adapter)
        yield generator


def _adapter(actor: Path) -> AdapterWeights | None:
    """Returns the checkpoint's adapter; None if it must be merged (DoRA, 4-bit base) or if all weights were trained."""
    folder = actor / ADAPTER
    if not (folder / ADAPTER_CONFIG).is_file() or read_quantization(folder) is not None:
        return None
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        settings = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        if settings.get("use_dora"):
            return None
        return AdapterWeights(tensors=load_file(folder / ADAPTER_WEIGHTS), adapter_config=settings)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be read as an adapter: {error}") from error


def _merged(actor: Path, config: RunConfig, stack: contextlib.ExitStack) -> str:
    model = config.worker.actor.model
    folder = stack.enter_context(OwnFolder("evaluate")) / "model"
    base = BaseModel(
        path=model.model_path,
        tokenizer_path=model.tokenizer_path,
        override_config=model.override_config,
        trust_remote_code=model.trust_remote_code,
    )
    merge_checkpoint(actor, folder, base, dtype=config.worker.rollout.dtype)
    return str(folder)
