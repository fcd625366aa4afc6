"""Builds vLLM's configuration and chooses its attention for the card, by the trainer's own start of the engine."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from lab.gpu_dry.cards import report
from lab.gpu_dry.checkpoint import write_configuration
from testing.shapes import SHAPES


class _Reached(BaseException):
    """Ends the start of the engine with its configuration; no `Exception`, so that nothing handles it."""

    def __init__(self, config: Any) -> None:
        self.config = config


def configuration(folder: Path, *, ranks: int, tensor_parallel_size: int, sleeps: bool) -> Any:
    """Returns vLLM's configuration as `cepo.rollout.vllm_process.start_engine` causes it to be made on this card."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from cepo.config import load_config
    from cepo.rollout.factory import most_responses_at_once
    from cepo.rollout.generator import GeneratorSettings
    from cepo.rollout.vllm_process import start_engine

    if ranks > 1:
        os.environ |= {"RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)

    def stop(engine_args: Any, usage_context: Any, **_: Any) -> None:
        raise _Reached(engine_args.create_engine_config(usage_context))

    sizes = [f"trainer.n_gpus_per_node={ranks}", f"worker.rollout.tensor_parallel_size={tensor_parallel_size}"]
    run = load_config(["config=geo3k/cepo", *sizes])
    settings = GeneratorSettings(
        model_path=str(folder),
        dtype="bf16",
        max_model_len=4096,
        lora_rank=16,
        adapted_layers=("q_proj", "v_proj"),
        sleep=sleeps,
        tensor_parallel_size=tensor_parallel_size,
        max_num_seqs=most_responses_at_once(run.data, run.worker.rollout, num_devices=run.trainer.num_devices),
    )
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # vLLM is imported here before the trainer sets it
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    from vllm.v1.engine.llm_engine import LLMEngine

    LLMEngine.from_engine_args = stop  # pyright: ignore[reportAttributeAccessIssue]
    try:
        start_engine(settings)
    except _Reached as reached:
        return reached.config
    raise AssertionError("the engine started without a configuration")


def attention(config: Any, width: int) -> str:
    """Returns the name of the attention backend that vLLM chooses for heads of this width."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    with set_current_vllm_config(config):
        return get_attn_backend(width, torch.bfloat16, config.cache_config.cache_dtype).get_name()


def main(shape: str, ranks: int, tensor_parallel_size: int, sleeps: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_configuration(shape, Path(folder))
        config = configuration(Path(folder), ranks=ranks, tensor_parallel_size=tensor_parallel_size, sleeps=sleeps)
        sizes = config.compilation_config.cudagraph_capture_sizes
        parallel = config.parallel_config
        report(
            ok=parallel.tensor_parallel_size == tensor_parallel_size
            and parallel.disable_custom_all_reduce
            and config.model_config.enable_sleep_mode == sleeps
            and config.lora_config.target_modules == ["q_proj", "v_proj"]
            and config.use_v2_model_runner
            and str(config.model_config.head_dtype) == "torch.float32",
            found=f"{attention(config, SHAPES[shape].head_width)}, {config.scheduler_config.max_num_seqs} sequences, "
            f"{len(sizes)} graph sizes, custom all-reduce off",
        )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "sleep")
