"""vLLM as a guest in this process: its environment, start and end, and what of the caller's it must leave alone."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cepo.errors import EngineError
from cepo.models.cpu_torch import repair_this_process_and_its_children

if TYPE_CHECKING:
    from vllm import LLM

logger = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")
_ENVIRONMENT_DEFAULTS = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
_CPU_ENVIRONMENT_DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # The default binding pins the engine's threads and takes cores away from the trainer in the same process.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Its CPU build warns a dozen times at each start of what is chosen here on purpose (eager, no Triton, in process).
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def start_engine(options: dict[str, Any], *, enforce_eager: bool) -> LLM:
    """Starts the engine and leaves the caller's random state and torch settings as they were.

    Raises:
        EngineError: vLLM is missing or did not start.
    """
    # Weights are handed over as tensors, which needs the engine in this very process.
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
        logger.warning("VLLM_ENABLE_V1_MULTIPROCESSING is overridden with 0: the engine must live in this process")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    repair_this_process_and_its_children()
    import torch

    on_cpu = without_gpu()
    for variable, value in (_ENVIRONMENT_DEFAULTS | (_CPU_ENVIRONMENT_DEFAULTS if on_cpu else {})).items():
        os.environ.setdefault(variable, value)
    several = has_process_group() and torch.distributed.get_world_size() > 1
    if several:
        # One engine per rank of the trainer's process group, or per group of neighbouring ranks.
        options = options | {"distributed_executor_backend": "external_launcher"}
    if on_cpu:
        # Says that Triton, which vLLM's own CPU build brings in, has no CPU part.
        logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
    try:
        from vllm import LLM
    except ImportError as error:
        advice = "install the package with the extra 'cpu' or 'gpu', or set worker.rollout.name=transformers"
        raise EngineError(f"vLLM cannot be imported ({error}); {advice}") from error
    try:
        shared = own_shared_memory() if several and on_cpu else contextlib.nullcontext()
        with callers_state_kept(), shared, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return LLM(enforce_eager=enforce_eager or on_cpu, **options)
    except Exception as error:
        raise EngineError(f"vLLM could not start on '{options['model']}': {last_words(error)}") from error


@contextlib.contextmanager
def own_shared_memory() -> Iterator[None]:
    """Around the start of engines that ranks of a machine share, without a GPU; collective.

    vLLM names the memory that they exchange data in alike for all runs of a machine: a second run, or one after ranks that
    were killed, could not start. Here the name is the run's own, and is taken away once all ranks have the memory.
    """
    import torch
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as Exchange

    agreed = [uuid.uuid4().hex]
    torch.distributed.broadcast_object_list(agreed, src=0)
    plain, names = Exchange.make_group_name, list[str]()

    def make_group_name(communicator: Any) -> str:
        names.append(f"cepo-{agreed[0]}{plain(communicator).strip('/')}")
        return names[-1]

    Exchange.make_group_name = staticmethod(make_group_name)
    try:
        yield
    finally:
        Exchange.make_group_name = staticmethod(plain)
        for file in _SHARED_MEMORY.glob(f"cepo-{agreed[0]}*"):
            if file.name.startswith(tuple(names)):  # other engines' ranks may not have theirs yet
                file.unlink(missing_ok=True)


def shut_down(llm: LLM, *, keep_process_group: bool) -> None:
    """Frees the engine; with `keep_process_group` without what vLLM does to torch.distributed at its end."""
    client: Any = llm.llm_engine.engine_core
    if not keep_process_group:
        client.shutdown()
        return
    # vLLM's own shutdown, here and when the client is collected, ends with destroying the default process group. What it
    # does before is done here; groups that vLLM made within the caller's would spoil the next engine's start.
    from vllm.distributed import parallel_state

    client._finalizer.detach()
    client.engine_core.model_executor.shutdown()
    client.engine_core.scheduler.shutdown()
    gc.unfreeze()
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
    parallel_state._WORLD = parallel_state._NODE_COUNT = None


def without_gpu() -> bool:
    """Whether torch, and with it vLLM, is a CPU build."""
    import torch

    return torch.version.cuda is None


def has_process_group() -> bool:
    """Whether torch.distributed's default process group exists."""
    import torch

    return torch.distributed.is_available() and torch.distributed.is_initialized()


@contextlib.contextmanager
def callers_state_kept() -> Iterator[None]:
    """Around every call into vLLM, whose engine lives in this process.

    It seeds and uses the global random streams, and its CPU build replaces `torch.set_num_threads`. Without a GPU its
    compiled helpers run uncompiled: they would need a C++ compiler on the machine and stall the first batches.
    """
    import numpy
    import torch

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


def last_words(error: BaseException) -> str:
    """The engine's own last lines, which name the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' | '.join(lines[-3:])}" if lines else type(error).__name__
