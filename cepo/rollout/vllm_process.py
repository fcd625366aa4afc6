"""Starts and ends vLLM in this process, sets its environment variables, and protects the caller's state from it."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from cepo.errors import EngineError
from cepo.files.trees import Tree
from cepo.hardware import Capability, drawing_devices, with_own_programs
from cepo.models.pretrained import DTYPE_NAMES
from cepo.rollout.generator import GeneratorSettings
from cepo.terminal.progress import phase

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from vllm import LLM

_SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_FP8_CAPABILITY = (8, 9)
_CPU_BLOCK_TOKENS = 32  # the smallest size for which the CPU build has fast kernels
_FIXED_OPTIONS: Mapping[str, object] = {
    "enable_prefix_caching": True,
    # The response's log-prob must not depend on temperature, bans or filters.
    "logprobs_mode": "raw_logprobs",
    # The folder's generation_config.json must not add sampling settings.
    "generation_config": "vllm",
    "disable_log_stats": True,
}
_STAGES_OF_START = {
    "determine_available_memory": "compiling the model and measuring its memory",
    "compile_or_warm_up_model": "capturing graphs",
}
"""What vLLM's start does, by the name of its worker's method."""
_COMMON_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
_CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # The default binding pins the engine's threads, which takes cores from the trainer in the same process.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # At each start the CPU build warns repeatedly about options that are intended here (eager, in process).
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_GPU_ENVIRONMENT = {
    # FlashInfer compiles its sampler with ninja and nvcc during vLLM's warm-up, and vLLM checks for neither. Requests
    # with a seed never use this sampler, and every request of a run has one.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # vLLM's monitor makes Triton print each autotuning of a kernel, including the trainer's.
    "TRITON_PRINT_AUTOTUNING": "0",
    # For an engine on several devices: each rank sees only its own, but these all-reduces use memory of others. NCCL
    # remains.
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}


_GRAPH_SIZES = [1, 2, 4, 8, *range(16, 128, 16), *range(128, 256, 32), *range(256, 513, 64)]


def engine_options(
    settings: GeneratorSettings, *, capability: Capability | None, flashinfer_kernels: bool, num_ranks: int
) -> Tree:
    """Returns the keyword arguments of `vllm.LLM`.

    `capability` is the GPU's, None without one. `flashinfer_kernels` tells whether FlashInfer's kernels are installed in
    compiled form. Each of the trainer's `num_ranks` processes sees one device. Raises `EngineError`: the device
    does not support a setting.
    """
    on_gpu = capability is not None
    _require_device(settings, capability)
    options: Tree = {
        **_FIXED_OPTIONS,
        "model": settings.model_path,
        "dtype": DTYPE_NAMES[settings.dtype],
        "max_model_len": settings.max_model_len,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "seed": settings.seed,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enforce_eager": settings.enforce_eager or not on_gpu,
        "limit_mm_per_prompt": {"image": settings.limit_images, "video": settings.limit_videos},
        # Without a GPU each sample is a request, and they share processed images; with one, each prompt is a request.
        "mm_processor_cache_gb": 0 if on_gpu else 1,
        "trust_remote_code": settings.trust_remote_code,
        "use_tqdm_on_load": not settings.disable_tqdm and sys.stderr.isatty(),
        "enable_sleep_mode": sleeps(settings, on_gpu=on_gpu),
        "tensor_parallel_size": settings.tensor_parallel_size,
        # One engine per rank of the trainer's process group, or per group of neighbouring ranks.
        "distributed_executor_backend": "external_launcher" if num_ranks > 1 else None,
        # On a GPU 16-bit operands give float32; elsewhere both are cast.
        "hf_overrides": _with_float32_head if settings.fp32_logits else {},
        "quantization": settings.quantization,
        **_adapter_options(settings),
    }
    if capability is None:
        options["logits_processors"] = ["cepo.rollout.vllm_sampling:SeededDraws"]
        # Only whole blocks are shared, and the default of 128 tokens is longer than a small prompt.
        options["block_size"] = _CPU_BLOCK_TOKENS
        return options
    return options | _gpu_options(settings, capability, flashinfer_kernels=flashinfer_kernels)


def _with_float32_head(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the model's configuration with a head that gives float32.

    vLLM reads the type from the configuration of the model that owns the head: the language model's in some families
    (InternVL, GLM-4V, Gemma, LLaVA-OneVision, LFM2-VL), the whole model's in others.
    """
    for part in (config, config.get_text_config()):
        part.head_dtype = "float32"
    return config


def _require_device(settings: GeneratorSettings, capability: Capability | None) -> None:
    if settings.tensor_parallel_size > 1 and capability is None:
        raise EngineError(
            f"worker.rollout.tensor_parallel_size is {settings.tensor_parallel_size}, but engines are shared on GPUs only: "
            "vLLM's CPU build gives the shared memory of all runs on a machine the same name; set it to 1"
        )
    if settings.quantization is not None and (capability is None or capability < _FP8_CAPABILITY):
        device = "there is none" if capability is None else f"this one's is {capability[0]}.{capability[1]}"
        raise EngineError(
            f"worker.rollout.quantization is {settings.quantization}, which needs a GPU of compute capability 8.9 or later "
            f"(Ada, Hopper, Blackwell), but {device}; set it to null"
        )


def _adapter_options(settings: GeneratorSettings) -> Tree:
    if settings.lora_rank == 0:
        return {"enable_lora": False}
    return {
        "enable_lora": True,
        # vLLM itself refuses a rank above all of them.
        "max_lora_rank": next((rank for rank in _SERVED_RANKS if rank >= settings.lora_rank), settings.lora_rank),
        # Without names vLLM computes an adapter in the embeddings and the head too, at each token.
        "lora_target_modules": list(settings.adapted_layers) or None,
    }


def _gpu_options(settings: GeneratorSettings, capability: Capability, *, flashinfer_kernels: bool) -> Tree:
    options: Tree = {}
    if capability[0] == 10 and not flashinfer_kernels:
        # vLLM's first choice there is FlashInfer, which without compiled kernels compiles for minutes and may download
        # sources, or fails. FLASH_ATTN is FlashAttention 4 there, which brings its own compiler.
        options["attention_config"] = {"backend": "FLASH_ATTN"}
    # Both all-reduces look up devices by their number on the machine, but a rank sees only one of them: IndexError.
    compilation: Tree = {"pass_config": {"fuse_allreduce_rms": False}}
    options["disable_custom_all_reduce"] = True
    options["compilation_config"] = compilation
    if not settings.enforce_eager:
        compilation["cudagraph_capture_sizes"] = graph_sizes(settings.max_num_seqs or _GRAPH_SIZES[-1])
    return options


def graph_sizes(most_responses: int) -> list[int]:
    """Returns the numbers of responses for which vLLM captures graphs: up to the first that has room for all.

    vLLM fills a batch up to the next size. Its own sizes are 8 and 16 apart, up to 512: 35 of them for 256 responses, in
    four kinds of graphs, took 36 s of a start of 135 s on an H200.
    """
    smaller = [size for size in _GRAPH_SIZES if size < most_responses]
    return _GRAPH_SIZES[: len(smaller) + 1]


def sleeps(settings: GeneratorSettings, *, on_gpu: bool) -> bool:
    """Returns whether the engine frees its memory between sampling phases; undecided (`auto`), it does on a GPU."""
    return on_gpu and settings.sleep is not False


def start_engine(settings: GeneratorSettings) -> LLM:
    """Starts the engine; raises EngineError if it does not start, or does not support a setting."""
    # Weights are passed as tensors, which requires the engine to be in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    options: Any = engine_options(
        settings,
        capability=None if without_gpu() else torch.cuda.get_device_capability(),
        flashinfer_kernels=importlib.util.find_spec("flashinfer_jit_cache") is not None,
        num_ranks=torch.distributed.get_world_size() if has_process_group() else 1,
    )
    prepare_environment(on_gpu=not without_gpu())
    waited_for = "this takes seconds"
    if not without_gpu():
        waited_for = "it loads the weights, compiles the model and captures graphs, which takes 1 to 2 minutes"
    with phase(f"starting vLLM: {waited_for}"):
        try:
            from vllm import LLM

            with callers_state_kept(), stages_shown(), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                if without_gpu():
                    _load_model_classes(settings)
                return LLM(**options)
        except Exception as error:
            raise EngineError(f"vLLM could not start on '{settings.model_path}': {last_lines(error)}") from error


@contextlib.contextmanager
def stages_shown() -> Iterator[None]:
    """Names what vLLM's start is busy with in the lines of progress, in place of vLLM's bars of graphs."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    executors: Any = UniProcExecutor
    call = executors.collective_rpc

    def shown(executor: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        stage = _STAGES_OF_START.get(method) if isinstance(method, str) else None
        if stage is None:
            return call(executor, method, *args, **kwargs)
        with phase(stage, is_brief=True):
            return call(executor, method, *args, **kwargs)

    graphs: Any = None
    if not without_gpu():
        from vllm.v1.worker.gpu import cudagraph_utils as graphs
    bar = getattr(graphs, "tqdm", None)
    executors.collective_rpc = shown
    if bar is not None:
        graphs.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        executors.collective_rpc = call
        if bar is not None:
            graphs.tqdm = bar


def _is_another_message(record: logging.LogRecord) -> bool:
    return "no matching PunicaWrapper" not in str(record.msg)


def _load_model_classes(settings: GeneratorSettings) -> None:
    """Loads the model's vLLM classes in this process; vLLM would first inspect them in another one, for 10 seconds.

    It does so to keep CUDA out of this process, and caches the result for the user. Without a GPU this is not needed.
    """
    from transformers import AutoConfig
    from vllm import ModelRegistry

    config = AutoConfig.from_pretrained(settings.model_path, trust_remote_code=settings.trust_remote_code)
    for name in config.architectures or ():
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def require_float32_head(llm: LLM) -> None:
    """Raises EngineError unless the engine's LM head returns float32 logits like the trainer's."""
    types: set[str] = set()
    for worker_types in llm.collective_rpc(_head_types):
        types |= worker_types
    if types != {"torch.float32"}:
        raise EngineError(
            f"worker.actor.model.fp32_logits is true, but vLLM computes this model's logits in {', '.join(sorted(types))}, "
            "and the trainer would compute other log-probs than it; set worker.actor.model.fp32_logits=false, or "
            "worker.rollout.name=transformers"
        )


def _head_types(worker: Any) -> set[str]:
    """Runs in vLLM's worker."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    modules = worker.model_runner.get_model().modules()
    return {str(module.head_dtype) for module in modules if isinstance(module, LogitsProcessor)}


def prepare_environment(*, on_gpu: bool) -> None:
    """Sets variables that are not yet set, adds the folder of this Python's tools to the PATH, and silences three warnings."""
    device_environment = _GPU_ENVIRONMENT if on_gpu else _CPU_ENVIRONMENT
    environment = _COMMON_ENVIRONMENT | device_environment
    for variable, value in environment.items():
        os.environ.setdefault(variable, value)
    os.environ["PATH"] = with_own_programs(os.environ.get("PATH", ""))
    # The first notices that Triton compiles the trainer's kernels, and reports this as a fault of the engine's warm-up.
    # The second warns that Triton, which vLLM's CPU build itself installs, does not support CPUs.
    for name in ("vllm.utils.jit_monitor", "vllm.triton_utils.importing"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # One for each layer of the vision tower, which has no adapter (`lora_target_modules`), about a hundred.
    logging.getLogger("vllm.lora.model_manager").addFilter(_is_another_message)


def shut_down(llm: LLM, *, keep_process_group: bool) -> None:
    """Frees the engine; `keep_process_group` avoids vLLM's shutdown of torch.distributed."""
    client: Any = llm.llm_engine.engine_core
    # vLLM's worker frees its model and then, without collecting, the memory pools of an engine that sleeps. The LoRA
    # manager still refers to the model, and a GPU's allocator aborts if a pool holds a tensor.
    llm.collective_rpc(_free_model)
    gc.unfreeze()
    gc.collect()
    gc.collect()  # what the first round finalised
    if not keep_process_group:
        client.shutdown()
        return
    # vLLM's own shutdown, here and when the client is collected, ends by destroying the default process group. Its
    # earlier steps are done here. Groups that vLLM created within the caller's would prevent the start of the next
    # engine.
    from vllm.distributed import parallel_state

    client._finalizer.detach()
    client.engine_core.model_executor.shutdown()
    client.engine_core.scheduler.shutdown()
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
    parallel_state._WORLD = None
    parallel_state._NODE_COUNT = None


def _free_model(worker: Any) -> None:
    """Runs in vLLM's worker."""
    runner = worker.model_runner
    runner.lora_manager = None
    runner.shutdown()
    worker.worker.model_runner = None


def without_gpu() -> bool:
    return torch.version.cuda is None  # vLLM's build is that of torch


def has_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@contextlib.contextmanager
def callers_state_kept() -> Iterator[None]:
    """Preserves the caller's state around every call into vLLM, whose engine is in this process.

    vLLM seeds and uses the global random streams, and its CPU build replaces `torch.set_num_threads`. Without a GPU its
    compiled helpers run eagerly, because compiling them would require a C++ compiler and stall the first batches.
    """
    import numpy

    python_state = random.getstate()
    numpy_state = numpy.random.get_state()
    set_num_threads = torch.set_num_threads
    num_threads = torch.get_num_threads()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=drawing_devices()))
            if without_gpu():
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)


def last_lines(error: BaseException) -> str:
    """Returns the last 3 lines of an engine's error, which name the cause."""
    lines = [line.strip() for line in str(error).splitlines()]
    filled_lines = [line for line in lines if line]
    if not filled_lines:
        return type(error).__name__
    return f"{type(error).__name__}: {' | '.join(filled_lines[-3:])}"
