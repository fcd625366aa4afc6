"""Requests in vLLM's engine: queued together, handed back as they finish, and how much of their prompts was shared."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from cepo.metrics import Metrics, fraction

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams
    from vllm.outputs import RequestOutput


def finished_requests(
    llm: LLM, prompts: Sequence[Any], samplings: Sequence[SamplingParams], *, lora_request: Any, show_progress: bool
) -> Generator[tuple[int, RequestOutput], None, None]:
    """(index, result) of each request in the order in which they finish. Closing the iterator early drops the others."""
    engine = llm.llm_engine
    identifiers = llm.enqueue(prompts, samplings, lora_request=lora_request, use_tqdm=False)
    # vLLM numbers requests, appends random characters for its own use, and answers with the number.
    waiting = {identifier.split("-")[0]: index for index, identifier in enumerate(identifiers)}
    with _progress(len(waiting), show_progress) as progress:
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        progress.update()
                        yield waiting.pop(output.request_id), output  # type: ignore[misc]
        except GeneratorExit:
            engine.abort_request(list(waiting))
            raise


def _progress(total: int, shown: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="Sampling responses", dynamic_ncols=True, disable=not shown)


class PrefixCounter:
    """Counts prompt tokens that the engine took from its cache instead of computing them.

    vLLM keeps these counts itself, at the place where a request is admitted; only its collection of all statistics, which
    costs time at each token, stays off.
    """

    def __init__(self, llm: LLM) -> None:
        from vllm.v1.metrics.stats import PrefixCacheStats

        core: Any = llm.llm_engine.engine_core
        self._manager = core.engine_core.scheduler.kv_cache_manager
        self._manager.log_stats = True
        self._manager.prefix_cache_stats = PrefixCacheStats()

    def drain(self) -> Metrics:
        """`work/rollout_prefix_hits`: the share of all samples' prompt tokens since the last call; empty if there were none."""
        counts = self._manager.make_prefix_cache_stats()
        if not counts.queries:
            return {}
        return {"work/rollout_prefix_hits": fraction(counts.hits, counts.queries)}
