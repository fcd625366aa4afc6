"""Builds the rollout engine of an evaluation and loads a checkpoint's weights into it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from cepo.config import RunConfig
from cepo.leftovers import OwnFolder
from cepo.models.processing import Processing
from cepo.models.quantization import read_quantization
from cepo.rollout.factory import build_generator, settings_of_run
from cepo.rollout.generator import AdapterWeights, Generator
from cepo.workers.adapter_files import ADAPTER_CONFIG, read_adapter
from cepo.workers.checkpoint import ADAPTER
from cepo.workers.distributed import this_device
from cepo.workers.merged_model import BaseModel, merge_checkpoint


@contextlib.contextmanager
def engine(
    config: RunConfig, processing: Processing, actor: Path | None, most_visuals: tuple[int, int]
) -> Iterator[Generator]:
    """Yields a generator with the weights of a checkpoint's `actor` folder; without one, with the model's own.

    Raises:
        ConfigError, CheckpointError, EngineError: model or checkpoint cannot be loaded.
    """
    adapter = None if actor is None else adapter_of(actor)
    with contextlib.ExitStack() as stack:
        of_run = settings_of_run(config, most_visuals=most_visuals)
        settings = dataclasses.replace(
            of_run,
            model_path=of_run.model_path if actor is None or adapter is not None else _merged(actor, config, stack),
            lora_rank=0 if adapter is None else int(str(adapter.adapter_config["r"])),
            max_num_batched_tokens=max(config.worker.rollout.max_num_batched_tokens, of_run.max_model_len),
            max_num_seqs=config.worker.rollout.max_num_seqs,  # the default is for the batches of the run
            tensor_parallel_size=1,
            sleeps=False,
            show_progress=False,  # the command draws a bar over problems
        )
        generator = build_generator(settings, processing, device=this_device().type)
        stack.callback(generator.close)
        if adapter is not None:
            generator.sync_weights(adapter)
        yield generator


def adapter_of(actor: Path) -> AdapterWeights | None:
    """Returns the checkpoint's adapter; None if it must be merged (DoRA, 4-bit base) or if all weights were trained."""
    folder = actor / ADAPTER
    if not (folder / ADAPTER_CONFIG).is_file() or read_quantization(folder) is not None:
        return None
    adapter = read_adapter(folder)
    return None if adapter.adapter_config.get("use_dora") else adapter


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
