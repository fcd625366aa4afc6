"""Starts and ends vLLM in this process, sets its environment, and protects the caller's state from it."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import uuid
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cepo.errors import EngineError
from cepo.hardware.tools import look_for_tools, path_with, program_folder
from cepo.leftovers import OwnFolder
from cepo.progress import phase
from cepo.rollout.engine_options import EngineMachine, engine_environment, engine_options
from cepo.rollout.generator import GeneratorSettings

if TYPE_CHECKING:
    from vllm import LLM

logger = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")


def start_engine(settings: GeneratorSettings) -> LLM:
    """Starts the engine and leaves the caller's random state and torch settings unchanged.

    Raises:
        EngineError: vLLM is missing or did not start, or does not support a setting.
    """
    # Weights are handed over as tensors, which requires the engine in this very process.
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
        logger.warning("VLLM_ENABLE_V1_MULTIPROCESSING is overridden with 0: the engine must live in this process")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    machine = this_machine()
    options = engine_options(settings, machine)
    prepare_environment(engine_environment(settings, machine))
    _silence_warnings(machine)
    with phase("starting vLLM; without a GPU this takes seconds, with one up to a few minutes"):
        return _started(settings.model_path, options, machine)


def _started(model_path: str, options: Mapping[str, Any], machine: EngineMachine) -> LLM:
    try:
        from vllm import LLM
    except ImportError as error:
        advice = "install the package with the extra 'cpu' or 'gpu', or set worker.rollout.name=transformers"
        raise EngineError(f"vLLM cannot be imported ({error}); {advice}") from error
    try:
        shared = own_shared_memory() if machine.num_ranks > 1 and not machine.on_gpu else contextlib.nullcontext()
        with callers_state_kept(), shared, meeting_places_removed(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            if not machine.on_gpu:
                _load_model_classes(model_path, trust_remote_code=options["trust_remote_code"])
            return LLM(**options)
    except Exception as error:
        raise EngineError(f"vLLM could not start on '{model_path}': {last_words(error)}") from error


def _load_model_classes(model_path: str, *, trust_remote_code: bool) -> None:
    """Loads vLLM's classes of a model here, where vLLM would first look at them in a process of 10 seconds.

    That process keeps CUDA out of this one, and what it finds is kept in the user's cache. Without a GPU there is no CUDA.
    """
    from transformers import AutoConfig
    from vllm import ModelRegistry

    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    for name in config.architectures or ():
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def require_float32_head(llm: LLM) -> None:
    """Checks that the engine's LM head returns float32, as the trainer's does: both must round their logits alike.

    Raises:
        EngineError: the engine computes logits in another type.
    """
    found = set().union(*llm.collective_rpc(_head_types))
    if found != {"torch.float32"}:
        raise EngineError(
            f"worker.actor.model.fp32_logits is true, but vLLM computes this model's logits in {', '.join(sorted(found))}, "
            "and the trainer would compute other log-probs than it; set worker.actor.model.fp32_logits=false, or "
            "worker.rollout.name=transformers"
        )


def _head_types(worker: Any) -> set[str]:
    """Runs in vLLM's worker: returns the types of the logits of its LM heads."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    modules = worker.model_runner.get_model().modules()
    return {str(module.head_dtype) for module in modules if isinstance(module, LogitsProcessor)}


def this_machine() -> EngineMachine:
    """Returns the properties of this machine that an engine of this process depends on."""
    return EngineMachine(
        capability=None if without_gpu() else torch.cuda.get_device_capability(),
        serves_flashinfer=look_for_tools().serves_flashinfer,
        num_ranks=torch.distributed.get_world_size() if has_process_group() else 1,
    )


def prepare_environment(defaults: Mapping[str, str]) -> None:
    """Sets vLLM's environment variables that are not set yet, and puts the programs beside this Python on the PATH."""
    for variable, value in defaults.items():
        os.environ.setdefault(variable, value)
    os.environ["PATH"] = path_with(program_folder(), os.environ.get("PATH", ""))


def _silence_warnings(machine: EngineMachine) -> None:
    if machine.on_gpu:
        # It sees Triton compile the trainer's kernels in this process, and reports that as a fault of the engine's warm-up.
        logging.getLogger("vllm.utils.jit_monitor").setLevel(logging.ERROR)
    else:
        # Says that Triton, which vLLM's own CPU build installs, has no CPU part.
        logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)


@contextlib.contextmanager
def own_shared_memory() -> Iterator[None]:
    """Gives engines without a GPU their own shared memory while they start on the ranks of a machine; collective.

    vLLM gives the memory for data exchange the same name in all runs of a machine: a second run, or one after killed
    ranks, could not start. Here the name is unique to the run, and is removed once all ranks have the memory.
    """
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


@contextlib.contextmanager
def meeting_places_removed() -> Iterator[None]:
    """Removes shared memory and sockets by which an engine's ranks find each other while it starts, once all have.

    vLLM leaves the sockets in the temporary folder, and the memory, 25 MB, where a rank is killed. Memory that has lost its
    name, and a connection that has lost its socket's file, work on until their processes end.
    """
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    plain, variable = MessageQueue.wait_until_ready, "VLLM_RPC_BASE_PATH"

    def wait_until_ready(self: Any) -> None:
        plain(self)
        if self.buffer is not None and self.buffer.is_creator:
            self.buffer.shared_memory.unlink()
            self.buffer.is_creator = False  # which would remove the name again at its end

    before = os.environ.get(variable)
    MessageQueue.wait_until_ready = wait_until_ready
    try:
        with OwnFolder("vllm") as folder:
            os.environ[variable] = str(folder)
            yield
    finally:
        MessageQueue.wait_until_ready = plain
        os.environ.pop(variable)
        if before is not None:
            os.environ[variable] = before


def shut_down(llm: LLM, *, keep_process_group: bool) -> None:
    """Frees the engine; with `keep_process_group` without vLLM's own shutdown of torch.distributed."""
    client: Any = llm.llm_engine.engine_core
    if not keep_process_group:
        client.shutdown()
        return
    # vLLM's own shutdown, here and when the client is collected, ends with destroying the default process group. Its
    # earlier steps are done here; groups that vLLM made within the caller's would break the next engine's start.
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
    """Returns whether torch, and with it vLLM, is a CPU build."""
    return torch.version.cuda is None


def has_process_group() -> bool:
    """Returns whether torch.distributed's default process group exists."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@contextlib.contextmanager
def callers_state_kept() -> Iterator[None]:
    """Keeps the caller's state around every call into vLLM, whose engine lives in this process.

    vLLM seeds and uses the global random streams, and its CPU build replaces `torch.set_num_threads`. Without a GPU its
    compiled helpers run uncompiled: they would need a C++ compiler on the machine and stall the first batches.
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


def last_words(error: BaseException) -> str:
    """Returns the last lines of the engine's error, which name the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' | '.join(lines[-3:])}" if lines else type(error).__name__
