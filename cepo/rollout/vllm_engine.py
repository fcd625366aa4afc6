"""Samples with vLLM in this process, with the same code for vLLM's CPU and CUDA builds."""

from __future__ import annotations

import contextlib
import gc
import hashlib
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from cepo.errors import EngineError
from cepo.metrics import Metrics
from cepo.models.families import family_of
from cepo.models.processing import Processing
from cepo.rollout.generator import (
    AdapterWeights,
    Generation,
    GenerationRequest,
    GeneratorSettings,
    OnFinished,
    SamplingSettings,
    Weights,
    check_prompts,
)
from cepo.rollout.vllm_process import (
    callers_state_kept,
    has_process_group,
    last_lines,
    require_float32_head,
    shut_down,
    start_engine,
    without_gpu,
)
from cepo.rollout.vllm_weights import clear_caches, load_adapter, load_full

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from cepo.hardware import num_processors
from cepo.metrics import fraction
from cepo.progress import Progress

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams
    from vllm.outputs import RequestOutput


_MAX_BANNED_TOKENS = 1024


class VllmGenerator:
    """Implements `cepo.rollout.generator.Generator` with vLLM.

    Sample i of a request is drawn with its own random stream, seeded by `request.seed` and i. Without a GPU the streams
    are those of the transformers generator, so both draw the same tokens.

    Raises:
        EngineError: vLLM is missing or did not start; the message contains the last lines of vLLM's error.
    """

    name = "vllm"

    def __init__(self, settings: GeneratorSettings, processing: Processing) -> None:
        banned = sorted(set(processing.banned_token_ids) - set(processing.eos_token_ids))
        if len(banned) > _MAX_BANNED_TOKENS:
            raise EngineError(
                f"{len(banned)} tokens are banned from sampling; vLLM takes at most {_MAX_BANNED_TOKENS} per request. "
                f"Ban only vision and control tokens, or use the transformers generator (worker.rollout.name)"
            )
        self._settings, self._banned = settings, banned
        self._eos_token_ids = sorted(set(processing.eos_token_ids))
        self._draws_itself = without_gpu()
        self._sleeps = settings.sleeps and not self._draws_itself
        self._is_asleep, self._adapter_id = False, 0
        self._group_is_the_callers = has_process_group()
        llm = start_engine(settings)
        self._llm: LLM | None = llm
        if settings.fp32_logits:
            with self._closed_on_error():
                require_float32_head(llm)
        self._placeholders = family_of(llm.model_config.hf_config).placeholders(llm.model_config.hf_config)
        self._prefixes = PrefixCounter(llm)

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        settings: SamplingSettings,
        on_finished: OnFinished | None = None,
    ) -> list[list[Generation]]:
        """See `cepo.rollout.generator.Generator`.

        Raises:
            EngineError: a prompt is too long or has the wrong number of placeholders, or vLLM failed.
        """
        llm = self._engine()
        check_prompts(requests, settings, self._settings.max_model_len, *self._placeholders)
        num_samples = settings.num_samples if settings.temperature > 0 else 1  # greedy samples are equal
        calls = range(num_samples) if self._draws_itself else (0,)
        samplings = [self._sampling(request, settings, sample) for request in requests for sample in calls]
        prompts = [_prompt(request) for request in requests for _ in calls]
        groups: list[list[Generation]] = [[] for _ in requests]
        parts: list[dict[int, list[Generation]]] = [{} for _ in requests]
        with contextlib.closing(self._finished(llm, prompts, samplings)) as results:
            for number, result in results:
                index, call = divmod(number, len(calls))
                parts[index][call] = [_generation(output) for output in result.outputs]
                if len(parts[index]) == len(calls):
                    samples = [sample for call in calls for sample in parts[index][call]]
                    groups[index] = samples * (settings.num_samples // num_samples)
                    if on_finished is not None:
                        on_finished(index, groups[index])
        return groups

    def _finished(
        self, llm: LLM, prompts: Sequence[object], samplings: Sequence[SamplingParams]
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        try:
            with (
                callers_state_kept(),
                contextlib.closing(
                    finished_requests(
                        llm,
                        prompts,
                        samplings,
                        lora_request=self._adapter(),
                        show_progress=self._settings.show_progress,
                    )
                ) as results,
            ):
                yield from results
        except Exception as error:
            if llm.llm_engine.has_unfinished_requests():  # it failed while sampling, so its state is unknown
                self.close()
            raise EngineError(f"vLLM failed while generating: {last_lines(error)}") from error

    def sync_weights(self, weights: Weights) -> None:
        """See `cepo.rollout.generator.Generator`. An adapter is served unmerged.

        Raises:
            EngineError: the engine was started for the other kind of weights, or vLLM cannot serve these.
        """
        llm = self._engine()
        if isinstance(weights, AdapterWeights) != (self._settings.lora_rank > 0):
            raise EngineError(
                f"this engine was started with lora_rank={self._settings.lora_rank} and got {type(weights).__name__}; "
                "an adapter needs lora_rank above 0, full weights need lora_rank 0"
            )
        try:
            with callers_state_kept():
                if isinstance(weights, AdapterWeights):
                    # Each adapter has its own number, by which vLLM's caches distinguish adapters.
                    load_adapter(llm, weights, self._adapter_id + 1)
                    self._adapter_id += 1
                else:
                    load_full(llm, weights)
                clear_caches(llm)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"vLLM did not accept the new weights: {last_lines(error)}") from error

    def drain_metrics(self) -> Metrics:
        """See `cepo.rollout.generator.Generator`. The prompt of each sample counts."""
        return self._prefixes.drain()

    def rest(self) -> None:
        if self._sleeps and not self._is_asleep and self._llm is not None:
            with callers_state_kept():
                self._llm.sleep(level=1)
            self._is_asleep = True

    def close(self) -> None:
        """Shuts the engine down, but keeps the caller's process group."""
        if self._llm is not None:
            shut_down(self._llm, keep_process_group=self._group_is_the_callers)
            self._llm = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def _closed_on_error(self) -> Generator[None, None, None]:
        try:
            yield
        except EngineError:
            self.close()
            raise

    def _engine(self) -> LLM:
        if self._llm is None:
            raise EngineError("this vLLM engine was closed; build a new one")
        if self._is_asleep:
            torch.cuda.empty_cache()  # the engine allocates from the driver, not from torch's cached blocks
            with callers_state_kept():
                self._llm.wake_up()
            self._is_asleep = False
        return self._llm

    def _sampling(self, request: GenerationRequest, settings: SamplingSettings, sample: int) -> SamplingParams:
        """Returns vLLM's settings for all samples of a request, or only for `sample` if the tokens are drawn here."""
        from vllm import SamplingParams

        own: dict[str, Any]
        if self._draws_itself:
            from cepo.rollout.vllm_sampling import Draw

            draw = Draw(
                seed=request.seed,
                sample=sample,
                max_tokens=settings.max_response_length,
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                presence_penalty=settings.presence_penalty,
                banned=self._banned,
            )
            own = {"temperature": 0.0, "extra_args": draw.extra_args()}
        else:
            own = {
                "n": settings.num_samples if settings.temperature > 0 else 1,
                "temperature": settings.temperature,
                "top_p": settings.top_p,
                "top_k": settings.top_k,
                "presence_penalty": settings.presence_penalty,
                # vLLM seeds sample i with seed + i. Without spreading, prompts with close seeds would share noise.
                "seed": _spread_seed(request.seed),
                # Infinite, because the -100 of vLLM's HTTP API does not exclude a token.
                "logit_bias": dict.fromkeys(self._banned, float("-inf")),
            }
        return SamplingParams(
            max_tokens=settings.max_response_length,
            # Only the given tokens end a response, whatever end-of-sequence token the checkpoint defines.
            ignore_eos=True,
            stop_token_ids=None if settings.ignore_eos else self._eos_token_ids,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            **own,
        )

    def _adapter(self) -> Any:
        from vllm.lora.request import LoRARequest

        if self._adapter_id == 0:
            return None
        # vLLM requires a path but never reads it, because the adapter is already loaded.
        return LoRARequest(f"adapter-{self._adapter_id}", self._adapter_id, "in-memory")


def _prompt(request: GenerationRequest) -> Any:
    prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_ids)}
    visuals: dict[str, Any] = {}
    if request.images:
        visuals["image"] = list(request.images)
    if request.videos:
        visuals["video"] = [(video.frames, video.metadata()) for video in request.videos]
    return prompt | {"multi_modal_data": visuals} if visuals else prompt


def _generation(output: CompletionOutput) -> Generation:
    token_ids = tuple(output.token_ids)
    flat: Any = output.logprobs
    assert tuple(flat.token_ids) == token_ids, "one log-prob is requested for each token, its own"
    return Generation(response_ids=token_ids, log_probs=tuple(flat.logprobs), finished=output.finish_reason == "stop")


def _spread_seed(seed: int) -> int:
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=7).digest(), "little")


PREPARING = "cepo-prepares-images"
"""Name prefix of the threads that prepare images."""

_MOST_THREADS = 8


def finished_requests(
    llm: LLM, prompts: Sequence[object], samplings: Sequence[SamplingParams], *, lora_request: Any, show_progress: bool
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


def _enqueue(llm: LLM, prompts: Sequence[object], samplings: Sequence[SamplingParams], lora_request: Any) -> list[str]:
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


def _prepared(llm: LLM, prompts: Sequence[object]) -> Iterator[Any]:
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
