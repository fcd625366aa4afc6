"""Queues requests in vLLM's engine, returns their results as they finish, and counts shared prompt tokens."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from cepo.hardware.devices import num_processors
from cepo.metrics import Metrics, fraction
from cepo.progress import Progress

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams
    from vllm.outputs import RequestOutput

PREPARING = "cepo-prepares-images"
"""Name prefix of the threads that prepare images."""

_MOST_THREADS = 8


def finished_requests(
    llm: LLM, prompts: Sequence[Any], samplings: Sequence[SamplingParams], *, lora_request: Any, show_progress: bool
) -> Generator[tuple[int, RequestOutput], None, None]:
    """Yields (index, result) of each request when it finishes. Closing the iterator early aborts the others."""
    engine = llm.llm_engine
    identifiers = _enqueue(llm, prompts, samplings, lora_request)
    # vLLM appends random characters to a request's number for its own use, and answers with the number.
    waiting = {identifier.split("-")[0]: index for index, identifier in enumerate(identifiers)}
    with Progress("sampling responses", len(waiting), draws=show_progress) as progress:
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        progress.update()
                        yield waiting.pop(output.request_id), output  # type: ignore[misc]
        except GeneratorExit:
            engine.abort_request(list(waiting))
            raise


def _enqueue(llm: LLM, prompts: Sequence[Any], samplings: Sequence[SamplingParams], lora_request: Any) -> list[str]:
    """Queues requests like `LLM.enqueue`, but prepares images in parallel."""
    from vllm.sampling_params import RequestOutputKind

    engine, identifiers = llm.llm_engine, list[str]()
    try:
        for sampling, prepared in zip(samplings, _prepared(llm, prompts), strict=True):
            sampling.output_kind = RequestOutputKind.FINAL_ONLY
            number = str(next(llm.request_counter))
            identifiers.append(engine.add_request(number, prepared, sampling, lora_request=lora_request))
    except Exception:
        engine.abort_request(identifiers, internal=True)
        raise
    return identifiers


def _prepared(llm: LLM, prompts: Sequence[Any]) -> Iterator[Any]:
    """Yields the prompts in the engine's form, with their images prepared on several threads.

    vLLM uses one thread, because both ends of its cache of prepared images must agree on their order. With this cache
    (without a GPU), one thread is used here too. The first prompt is prepared alone and fills the processor's caches.
    """
    from vllm.renderers.inputs.preprocess import parse_model_prompt

    def prepare(prompt: Any) -> Any:
        (prepared,) = llm.renderer.render_cmpl([parse_model_prompt(llm.model_config, prompt)])
        return prepared

    if llm.renderer.mm_processor_cache is not None:
        yield from map(prepare, prompts)
        return
    yield from map(prepare, prompts[:1])
    with ThreadPoolExecutor(min(_MOST_THREADS, num_processors()), thread_name_prefix=PREPARING) as pool:
        yield from pool.map(prepare, prompts[1:])


class PrefixCounter:
    """Counts prompt tokens that the engine took from its cache instead of computing them.

    vLLM itself counts them when it admits a request. Its full statistics, which cost time at each token, remain off.
    """

    def __init__(self, llm: LLM) -> None:
        from vllm.v1.metrics.stats import PrefixCacheStats

        core: Any = llm.llm_engine.engine_core
        self._manager = core.engine_core.scheduler.kv_cache_manager
        self._manager.log_stats = True
        self._manager.prefix_cache_stats = PrefixCacheStats()

    def drain(self) -> Metrics:
        """Returns `work/rollout_prefix_hits`, the share of prompt tokens from the cache since the last call."""
        counts = self._manager.make_prefix_cache_stats()
        if not counts.queries:
            return {}
        return {"work/rollout_prefix_hits": fraction(counts.hits, counts.queries)}
