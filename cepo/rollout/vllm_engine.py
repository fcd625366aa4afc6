"""Samples with vLLM in this process, with the same code for vLLM's CPU and CUDA builds."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from cepo.errors import EngineError
from cepo.hardware import num_processors
from cepo.models.families import family_of
from cepo.models.processing import Processing
from cepo.models.response_end import ResponseEnd
from cepo.rollout.generator import (
    AdapterWeights,
    FullWeights,
    Generation,
    GenerationRequest,
    GeneratorSettings,
    OnFinished,
    SamplingSettings,
    Weights,
    check_lengths,
)
from cepo.rollout.transformers_generator import row_uniforms
from cepo.rollout.vllm_process import (
    callers_state_kept,
    has_process_group,
    last_lines,
    require_float32_head,
    shut_down,
    sleeps,
    start_engine,
    without_gpu,
)
from cepo.terminal.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from vllm import LLM, SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput

PREPARING = "cepo-prepares-images"  # name prefix of the threads that prepare images
_MOST_THREADS = 8


class VllmGenerator:
    """Implements `cepo.rollout.generator.Generator` with vLLM.

    Sample i of a request is drawn with its own random stream, seeded by `request.seed` and i. Without a GPU the streams
    are those of the transformers generator, so both draw the same tokens. Raises `EngineError`: vLLM did not start.
    """

    name = "vllm"

    def __init__(self, settings: GeneratorSettings, processing: Processing) -> None:
        self._settings = settings
        self._processing = processing
        self._banned = processing.banned_token_ids
        # Infinite, because the -100 of vLLM's HTTP API does not exclude a token.
        self._bans = dict.fromkeys(self._banned, float("-inf"))
        self._draws_itself = without_gpu()
        self._sleeps = sleeps(settings, on_gpu=not self._draws_itself)
        self._is_asleep = False
        self._adapter_id = 0
        self._group_is_the_callers = has_process_group()
        self._llm: LLM | None = start_engine(settings)
        if settings.fp32_logits:
            try:
                require_float32_head(self._llm)
            except EngineError:
                self.close()
                raise

    def generate(
        self, requests: Sequence[GenerationRequest], settings: SamplingSettings, on_finished: OnFinished | None = None
    ) -> list[list[Generation]]:
        llm = self._engine()
        check_lengths(requests, settings, self._settings.max_model_len)
        num_samples = settings.num_samples if settings.temperature > 0 else 1  # greedy samples are equal
        num_calls = num_samples if self._draws_itself else 1
        prompts: list[Any] = []
        samplings: list[SamplingParams] = []
        for request in requests:
            for call in range(num_calls):
                prompts.append(_prompt(request))
                samplings.append(self._sampling(request, settings, sample=call))
        groups: list[list[Generation]] = [[] for _ in requests]
        answers: list[dict[int, list[Generation]]] = [{} for _ in requests]  # by call, since calls end in any order
        num_responses = len(requests) * num_samples
        with contextlib.closing(self._finished(llm, prompts, samplings, num_responses)) as results:
            for number, result in results:
                index, call = divmod(number, num_calls)
                answers[index][call] = [_generation(output) for output in result.outputs]
                if len(answers[index]) < num_calls:
                    continue
                samples: list[Generation] = []
                for call in range(num_calls):
                    samples += answers[index][call]
                groups[index] = samples * (settings.num_samples // num_samples)
                if on_finished is not None:
                    on_finished(index, groups[index])
        return groups

    def _finished(
        self, llm: LLM, prompts: Sequence[object], samplings: Sequence[SamplingParams], num_responses: int
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """Yields (index, result) of each request when it finishes. Closing the iterator early aborts the others.

        The progress counts responses: a request of several ends with its last one, but vLLM waits for each of them.
        """
        engine = llm.llm_engine
        progress = Progress("sampling responses", num_responses, draws=not self._settings.disable_tqdm, is_even=False)
        try:
            with callers_state_kept(), progress:
                identifiers = self._enqueue(llm, prompts, samplings)
                # vLLM appends random characters to a request's number for its own use, and answers with the number.
                waiting = {identifier.split("-")[0]: index for index, identifier in enumerate(identifiers)}
                try:
                    for number_of_step in itertools.count(1):
                        if not engine.has_unfinished_requests():
                            break
                        outputs = engine.step()
                        progress.reach(
                            num_responses - engine.get_num_unfinished_requests(), f"{number_of_step} steps of vLLM"
                        )
                        for output in outputs:
                            if output.finished:
                                yield waiting.pop(output.request_id), output  # type: ignore[misc]
                except GeneratorExit:
                    engine.abort_request(list(waiting))
                    raise
        except Exception as error:
            self.close()  # its state is unknown
            raise EngineError(f"vLLM failed while generating: {last_lines(error)}") from error

    def _enqueue(self, llm: LLM, prompts: Sequence[object], samplings: Sequence[SamplingParams]) -> list[str]:
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        adapter = None
        if self._adapter_id > 0:
            # vLLM requires a path of an adapter but never reads it, because the adapter is already loaded.
            adapter = LoRARequest(f"adapter-{self._adapter_id}", self._adapter_id, "in-memory")
        identifiers: list[str] = []
        for sampling, prepared in zip(samplings, _prepared(llm, prompts), strict=True):
            sampling.output_kind = RequestOutputKind.FINAL_ONLY
            number = str(next(llm.request_counter))
            identifier = llm.llm_engine.add_request(number, prepared, sampling, lora_request=adapter)
            identifiers.append(identifier)
        return identifiers

    def sync_weights(self, weights: Weights) -> None:
        llm = self._engine()
        assert isinstance(weights, AdapterWeights) == (self._settings.lora_rank > 0), (
            "the run serves one kind of weights"
        )
        try:
            with callers_state_kept():
                if isinstance(weights, AdapterWeights):
                    # Each adapter has its own number, by which vLLM's caches distinguish adapters.
                    llm.collective_rpc(_add_adapter, args=(weights, self._adapter_id + 1))
                    self._adapter_id += 1
                else:
                    _load_full(llm, weights)
                # Keys, values and image embeddings of the old weights.
                if not llm.reset_prefix_cache():
                    raise EngineError("vLLM kept keys and values of the old weights, because requests are being served")
                llm.reset_mm_cache()
                llm.llm_engine.reset_encoder_cache()
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"vLLM did not accept the new weights: {last_lines(error)}") from error

    def rest(self) -> None:
        if self._sleeps and not self._is_asleep and self._llm is not None:
            with callers_state_kept():
                self._llm.sleep(level=1)
            self._is_asleep = True

    def close(self) -> None:
        if self._llm is not None:
            shut_down(self._llm, keep_process_group=self._group_is_the_callers)
            self._llm = None
        gc.collect()
        torch.cuda.empty_cache()

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

        drawing = (
            self._own_drawing(request, settings, sample) if self._draws_itself else self._drawing(request, settings)
        )
        return SamplingParams(
            max_tokens=settings.max_response_length,
            logprobs=0,
            flat_logprobs=True,
            **stopping(self._processing.end, ignore_eos=settings.ignore_eos),
            **drawing,
        )

    def _own_drawing(self, request: GenerationRequest, settings: SamplingSettings, sample: int) -> dict[str, Any]:
        """Returns the settings with which vLLM's logits processor draws one sample's tokens."""
        from cepo.rollout.vllm_sampling import DRAW, Draw

        uniforms = row_uniforms(request.seed, sample, settings.max_response_length)
        draw = Draw(uniforms, torch.tensor(self._banned, dtype=torch.long), settings)
        return {"temperature": 0.0, "extra_args": {DRAW: draw}}

    def _drawing(self, request: GenerationRequest, settings: SamplingSettings) -> dict[str, Any]:
        """Returns the settings with which vLLM draws the tokens of all samples of a request."""
        # vLLM seeds sample i with seed + i. Without spreading, prompts with close seeds would share noise.
        seed_digest = hashlib.blake2b(str(request.seed).encode(), digest_size=7).digest()
        return {
            "n": settings.num_samples if settings.temperature > 0 else 1,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "presence_penalty": settings.presence_penalty,
            "seed": int.from_bytes(seed_digest, "little"),
            "logit_bias": self._bans,
        }


def stopping(end: ResponseEnd, *, ignore_eos: bool) -> dict[str, Any]:
    """Returns vLLM's settings of what ends a response, whatever end-of-sequence token the checkpoint defines."""
    settings: dict[str, Any] = {"ignore_eos": True, "detokenize": False}
    if ignore_eos:
        return settings
    settings["stop_token_ids"] = sorted(end.token_ids)
    if end.text:
        # vLLM compares texts only if it makes them; the tokens of the text stay in the response.
        settings |= {"stop": [end.text], "include_stop_str_in_output": True, "detokenize": True}
    return settings


def _prompt(request: GenerationRequest) -> Any:
    visuals: dict[str, Any] = {}
    if request.images:
        # vLLM turns images by their metadata, and the trainer does not.
        assert not any(image.info for image in request.images), "images are pixels without metadata"
        visuals["image"] = list(request.images)
    if request.videos:
        visuals["video"] = [(video.frames, video.metadata()) for video in request.videos]
    prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_ids)}
    if visuals:
        prompt["multi_modal_data"] = visuals
    return prompt


def _generation(output: CompletionOutput) -> Generation:
    flat: Any = output.logprobs
    assert list(flat.token_ids) == list(output.token_ids), "one log-prob is requested for each token, its own"
    return Generation.of(flat.token_ids, flat.logprobs, finished=output.finish_reason == "stop")


def _prepared(llm: LLM, prompts: Sequence[object]) -> Iterator[Any]:
    """Yields the prompts in the engine's form, with their images prepared on several threads.

    vLLM uses one thread, because both ends of its cache of prepared images must agree on their order. With this cache
    (without a GPU), one thread is used here too. The first prompt is prepared alone and fills the processor's caches.
    """
    from vllm.renderers.inputs.preprocess import parse_model_prompt

    def prepare(prompt: Any) -> Any:
        parsed = parse_model_prompt(llm.model_config, prompt)
        (prepared,) = llm.renderer.render_cmpl([parsed])
        return prepared

    has_cache = llm.renderer.mm_processor_cache is not None
    num_alone = len(prompts) if has_cache else 1
    for prompt in prompts[:num_alone]:
        yield prepare(prompt)
    with ThreadPoolExecutor(min(_MOST_THREADS, num_processors()), thread_name_prefix=PREPARING) as pool:
        yield from pool.map(prepare, prompts[num_alone:])


def _load_full(llm: LLM, weights: FullWeights) -> None:
    """Overwrites the engine's weights one tensor at a time, as the mapping yields them."""
    config: PreTrainedConfig = llm.model_config.hf_config
    # Published checkpoints have this entry in the whole configuration, in its text part, or in both.
    parts = (config, config.get_text_config())
    is_tied = any(getattr(part, "tie_word_embeddings", False) for part in parts)
    assert not is_tied or "lm_head.weight" in weights.tensors, (
        "a tied lm_head.weight is missing; vLLM's would stay as it was"
    )
    family = family_of(config)
    llm.collective_rpc(_forget_packed_experts)
    published = (family.published(name, weight) for name, weight in weights.tensors.items())
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": published})


def _forget_packed_experts(worker: Any) -> None:
    """Drops packed experts, which vLLM's CPU build makes at the first load and would keep; runs in vLLM's worker."""
    if torch.cuda.is_available():
        return
    for module in worker.model_runner.model.modules():
        # Only vLLM's layers have a `quant_method`, and only that of its experts has a kernel.
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _add_adapter(worker: Any, weights: AdapterWeights, identifier: int) -> None:
    """Replaces all earlier adapters by this one, as vLLM does from a folder, but from tensors; runs in vLLM's worker."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager = worker.model_runner.lora_manager
    adapters = manager._adapter_manager
    helper = PEFTHelper.from_dict(weights.plain_config())
    helper.validate_legal(manager.lora_config)
    mapper = getattr(adapters.model, "hf_to_vllm_mapper", None)  # only if names differ from the checkpoint
    adapter = LoRAModel.from_lora_tensors(
        identifier,
        # vLLM scales one factor of each pair in place, which must not reach the trainer's weights.
        {name: tensor.detach().cpu().clone() for name, tensor in weights.tensors.items()},
        helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    _require_served(adapters, adapter.loras)
    manager.remove_all_adapters()
    adapters.add_adapter(adapter)
    adapters.activate_adapter(identifier)


def _require_served(adapters: Any, loras: Mapping[str, Any]) -> None:
    """Raises EngineError unless vLLM serves every module of an adapter, and each has both factors."""
    served_modules = set(adapters.modules).union(*adapters.packed_modules.values())
    misfits = [name for name, pair in sorted(loras.items()) if name not in served_modules or not _is_whole(pair)]
    if misfits:
        raise EngineError(
            f"the adapter does not fit the model: {len(misfits)} of its {len(loras)} modules are unknown to vLLM or "
            f"lack a factor of their rank, the first {', '.join(misfits[:3])}. vLLM serves adapters of the language model "
            "only; leave other modules out with worker.actor.model.lora.exclude_modules, or set "
            "worker.rollout.name=transformers"
        )


def _is_whole(pair: Any) -> bool:
    """Returns whether an adapter's module has both factors of its rank."""
    if pair.lora_a is None or pair.lora_b is None:
        return False
    return pair.lora_a.shape[0] == pair.rank == pair.lora_b.shape[1]
