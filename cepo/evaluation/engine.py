"""The engine of an evaluation: a model, with a checkpoint's weights put into it."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cepo.config import RunConfig
from cepo.errors import CheckpointError
from cepo.models.processing import Processing
from cepo.rollout.base import AdapterWeights, Generator
from cepo.rollout.factory import build_generator
from cepo.workers.checkpoint import ADAPTER
from cepo.workers.distributed import this_device
from cepo.workers.merge import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BaseModel, merge_checkpoint


@contextlib.contextmanager
def engine(
    config: RunConfig, processing: Processing, actor: Path | None, most_visuals: tuple[int, int]
) -> Iterator[Generator]:
    """A generator with the weights of a checkpoint's `actor` folder, or without one of the model as it is.

    Raises:
        ConfigError, CheckpointError, EngineError: model or checkpoint cannot be loaded.
    """
    rollout, model = config.worker.rollout, config.worker.actor.model
    length = config.data.max_prompt_length + config.data.max_response_length
    longest = rollout.max_model_len or length
    adapter = None if actor is None else _adapter(actor)
    with contextlib.ExitStack() as stack:
        path = model.model_path
        if actor is not None and adapter is None:
            path = _merged(actor, config, stack)
        generator = build_generator(
            rollout.name,
            model_path=path,
            dtype=rollout.dtype,
            device=this_device().type,
            max_model_len=longest,
            seed=rollout.seed,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            enforce_eager=rollout.enforce_eager,
            max_num_batched_tokens=max(rollout.max_num_batched_tokens, longest),
            limit_images=rollout.limit_images or most_visuals[0],
            limit_videos=most_visuals[1],
            lora_rank=0 if adapter is None else int(str(adapter.adapter_config["r"])),
            banned_token_ids=processing.banned_token_ids,
            eos_token_ids=processing.eos_token_ids,
            trust_remote_code=model.trust_remote_code,
            show_progress=not rollout.disable_tqdm and sys.stderr.isatty(),
            processing=processing,
        )
        stack.callback(generator.close)
        if adapter is not None:
            generator.sync_weights(adapter)
        yield generator


def _adapter(actor: Path) -> AdapterWeights | None:
    """The checkpoint's adapter; None where all weights were trained."""
    folder = actor / ADAPTER
    if not (folder / ADAPTER_CONFIG).is_file():
        return None
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        settings = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        return AdapterWeights(tensors=load_file(folder / ADAPTER_WEIGHTS), adapter_config=settings)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be read as an adapter: {error}") from error


def _merged(actor: Path, config: RunConfig, stack: contextlib.ExitStack) -> str:
    """A temporary model folder of a checkpoint in which all weights were trained."""
    model = config.worker.actor.model
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cepo-evaluate-"))) / "model"
    base = BaseModel(
        path=model.model_path,
        tokenizer_path=model.tokenizer_path,
        override_config=model.override_config,
        trust_remote_code=model.trust_remote_code,
    )
    merge_checkpoint(actor, folder, base, dtype=config.worker.rollout.dtype)
    return str(folder)
