"""Starts and ends vLLM in this process, sets its environment variables, and protects the caller's state from it."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import os
import random
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from cepo.errors import EngineError
from cepo.hardware import with_own_programs
from cepo.progress import phase
from cepo.rollout.engine_options import EngineMachine, engine_environment, engine_options
from cepo.rollout.generator import GeneratorSettings

if TYPE_CHECKING:
    from vllm import LLM

logger = logging.getLogger(__name__)


def start_engine(settings: GeneratorSettings) -> LLM:
    """Starts the engine; raises EngineError if vLLM is missing, does not start, or does not support a setting."""
    # Weights are passed as tensors, which requires the engine to be in this process.
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
        logger.warning("VLLM_ENABLE_V1_MULTIPROCESSING is overridden with 0: the engine must live in this process")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    machine = EngineMachine(
        capability=None if without_gpu() else torch.cuda.get_device_capability(),
        flashinfer_kernels=importlib.util.find_spec("flashinfer_jit_cache") is not None,
        num_ranks=torch.distributed.get_world_size() if has_process_group() else 1,
    )
    options: Any = engine_options(settings, machine)
    prepare_environment(engine_environment(settings, machine))
    _silence_warnings()
    with phase("starting vLLM; without a GPU this takes seconds, with one up to a few minutes"):
        try:
            from vllm import LLM
        except ImportError as error:
            advice = "install the package with the extra 'cpu' or 'gpu', or set worker.rollout.name=transformers"
            raise EngineError(f"vLLM cannot be imported ({error}); {advice}") from error
        try:
            with callers_state_kept(), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                if not machine.on_gpu:
                    _load_model_classes(settings)
                return LLM(**options)
        except Exception as error:
            raise EngineError(f"vLLM could not start on '{settings.model_path}': {last_lines(error)}") from error


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
    found = set().union(*llm.collective_rpc(_head_types))
    if found != {"torch.float32"}:
        raise EngineError(
            f"worker.actor.model.fp32_logits is true, but vLLM computes this model's logits in {', '.join(sorted(found))}, "
            "and the trainer would compute other log-probs than it; set worker.actor.model.fp32_logits=false, or "
            "worker.rollout.name=transformers"
        )


def _head_types(worker: Any) -> set[str]:
    """Runs in vLLM's worker."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    modules = worker.model_runner.get_model().modules()
    return {str(module.head_dtype) for module in modules if isinstance(module, LogitsProcessor)}


def prepare_environment(defaults: Mapping[str, str]) -> None:
    """Sets vLLM's environment variables unless already set, and adds the folder of this Python's tools to the PATH."""
    for variable, value in defaults.items():
        os.environ.setdefault(variable, value)
    os.environ["PATH"] = with_own_programs(os.environ.get("PATH", ""))


def _silence_warnings() -> None:
    # The first notices that Triton compiles the trainer's kernels, and reports this as a fault of the engine's warm-up.
    # The second warns that Triton, which vLLM's CPU build itself installs, does not support CPUs.
    for name in ("vllm.utils.jit_monitor", "vllm.triton_utils.importing"):
        logging.getLogger(name).setLevel(logging.ERROR)


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
    parallel_state._WORLD = parallel_state._NODE_COUNT = None


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

    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng())
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
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' | '.join(lines[-3:])}" if lines else type(error).__name__
