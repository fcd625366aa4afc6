"""Chooses vLLM's options and environment variables from the settings and the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cepo.errors import EngineError
from cepo.hardware import Capability
from cepo.models.pretrained import DTYPE_NAMES
from cepo.rollout.generator import GeneratorSettings
from cepo.trees import Tree

_SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_CPU_BLOCK_TOKENS = 32  # the smallest size for which the CPU build has fast kernels
_FIXED_OPTIONS: Mapping[str, object] = {
    "enable_prefix_caching": True,
    # The response's log-prob must not depend on temperature, bans or filters.
    "logprobs_mode": "raw_logprobs",
    # The folder's generation_config.json must not add sampling settings.
    "generation_config": "vllm",
    "disable_log_stats": True,
}

_ENVIRONMENT_DEFAULTS: Mapping[str, str] = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
_CPU_ENVIRONMENT_DEFAULTS: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # The default binding pins the engine's threads, which takes cores from the trainer in the same process.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # At each start the CPU build warns repeatedly about options that are intended here (eager, in process).
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_GPU_ENVIRONMENT_DEFAULTS: Mapping[str, str] = {
    # FlashInfer compiles its sampler with ninja and nvcc during vLLM's warm-up, and vLLM checks for neither. Requests
    # with a seed never use this sampler, and every request of a run has one.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # vLLM's monitor makes Triton print each autotuning of a kernel, including the trainer's.
    "TRITON_PRINT_AUTOTUNING": "0",
}
_SHARED_ENGINE_ENVIRONMENT_DEFAULTS: Mapping[str, str] = {
    # Each rank sees only its own device, but these all-reduces use memory of other devices. NCCL remains.
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}


@dataclass(frozen=True, kw_only=True)
class EngineMachine:
    """The properties of the machine that determine how the engine starts.

    `capability` is None without a GPU. `flashinfer_kernels`: FlashInfer's kernels are installed in compiled form.
    `num_ranks` processes in the trainer's process group see one device each.
    """

    capability: Capability | None
    flashinfer_kernels: bool
    num_ranks: int

    @property
    def on_gpu(self) -> bool:
        return self.capability is not None


def engine_options(settings: GeneratorSettings, machine: EngineMachine) -> Tree:
    """Returns the keyword arguments of `vllm.LLM`.

    Raises:
        EngineError: vLLM does not support the LoRA rank, or several devices would share an engine without a GPU.
    """
    if settings.tensor_parallel_size > 1 and not machine.on_gpu:
        raise EngineError(
            f"worker.rollout.tensor_parallel_size is {settings.tensor_parallel_size}, but engines are shared on GPUs only: "
            "vLLM's CPU build gives the shared memory of all runs on a machine the same name; set it to 1"
        )
    options: Tree = {
        **_FIXED_OPTIONS,
        "model": settings.model_path,
        "dtype": DTYPE_NAMES[settings.dtype],
        "max_model_len": settings.max_model_len,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "seed": settings.seed,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enforce_eager": settings.enforce_eager or not machine.on_gpu,
        "limit_mm_per_prompt": {"image": settings.limit_images, "video": settings.limit_videos},
        # Without a GPU each sample is a request, and they share processed images; with one, each prompt is a request.
        "mm_processor_cache_gb": 0 if machine.on_gpu else 1,
        "trust_remote_code": settings.trust_remote_code,
        "use_tqdm_on_load": settings.show_progress,
        "enable_sleep_mode": settings.sleep and machine.on_gpu,
        "tensor_parallel_size": settings.tensor_parallel_size,
    }
    if machine.num_ranks > 1:
        # One engine per rank of the trainer's process group, or per group of neighbouring ranks.
        options["distributed_executor_backend"] = "external_launcher"
    if settings.fp32_logits:
        # On a GPU 16-bit operands give float32; elsewhere both are cast.
        options["hf_overrides"] = {"head_dtype": "float32"}
    if settings.max_num_seqs is not None:
        options["max_num_seqs"] = settings.max_num_seqs
    if settings.lora_rank > 0:
        served = next((rank for rank in _SERVED_RANKS if rank >= settings.lora_rank), None)
        if served is None:
            raise EngineError(
                f"LoRA rank {settings.lora_rank} is above {_SERVED_RANKS[-1]}, the largest that vLLM serves"
            )
        options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": served}
    if not machine.on_gpu:
        options["logits_processors"] = ["cepo.rollout.vllm_sampling:SeededDraws"]
        # Only whole blocks are shared, and the default of 128 tokens is longer than a small prompt.
        options["block_size"] = _CPU_BLOCK_TOKENS
        return options
    if machine.capability is not None and machine.capability[0] == 10 and not machine.flashinfer_kernels:
        # vLLM's first choice there is FlashInfer, which without compiled kernels compiles for minutes and may download
        # sources, or fails. FLASH_ATTN is FlashAttention 4 there, which brings its own compiler.
        options["attention_config"] = {"backend": "FLASH_ATTN"}
    if settings.tensor_parallel_size > 1:
        # vLLM's own all-reduce looks up devices by their number on the machine, but a rank sees only one of them:
        # IndexError in `device_id_to_physical_device_id`.
        options["disable_custom_all_reduce"] = True
    compilation = _compilation(settings)
    return options | ({"compilation_config": compilation} if compilation else {})


def _compilation(settings: GeneratorSettings) -> Tree:
    found: Tree = {}
    if settings.max_num_seqs is not None and not settings.enforce_eager:
        # A graph for all responses, in vLLM's steps. By default it captures twice as many, up to 512 (1,024 on a B200),
        # for batches that contain prompts too.
        step = 8 if settings.max_num_seqs < 256 else 16
        found["max_cudagraph_capture_size"] = min(-(-settings.max_num_seqs // step) * step, 512)
    if settings.tensor_parallel_size > 1:
        # The fused pass uses FlashInfer's all-reduce, which looks up devices in the same way.
        found["pass_config"] = {"fuse_allreduce_rms": False}
    return found


def engine_environment(settings: GeneratorSettings, machine: EngineMachine) -> dict[str, str]:
    """Returns the environment variables to set before vLLM is imported, if the user has not set them."""
    shared = _SHARED_ENGINE_ENVIRONMENT_DEFAULTS if settings.tensor_parallel_size > 1 else {}
    of_device = {**_GPU_ENVIRONMENT_DEFAULTS, **shared} if machine.on_gpu else _CPU_ENVIRONMENT_DEFAULTS
    return {**_ENVIRONMENT_DEFAULTS, **of_device}
