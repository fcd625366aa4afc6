"""Samples with transformers, where vLLM is not installed or as the reproducible generator on a CPU."""

from __future__ import annotations

import copy
import gc
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.functional import pad

from cepo.errors import EngineError
from cepo.models.cpu.fused_decoding import FusedDecoder, FusedDecoding, fused_decoder
from cepo.models.head import use_float32_logits
from cepo.models.interface import EncodedPrompt
from cepo.models.pretrained import load_model, torch_dtype
from cepo.models.processing import Processing
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
from cepo.terminal.progress import Progress

_SHARE_THAT_GOES_ON = 0.75
"""Finished rows are dropped when at most this share of the rows is unfinished, because dropping copies the others."""


_BLOCK = 64
"""The number of neighbouring tokens whose probabilities are summed together when a token is drawn."""


class TransformersGenerator:
    """Implements `cepo.rollout.generator.Generator` with transformers and its own copy of the model.

    Each prompt is computed once and alone. All its samples share its keys and values, and are decoded together with
    those of other prompts, padded on the left. Sample i has its own random stream, seeded by (`request.seed`, i). A
    response therefore depends only on its prompt, its seed, i and the weights; the rest of the batch changes at most
    the last bits of its log-probs.

    `device` is "cpu", "cuda" or "cuda:N". Raises ConfigError or EngineError if the checkpoint cannot be loaded.
    """

    name = "transformers"

    def __init__(self, settings: GeneratorSettings, processing: Processing, *, device: str) -> None:
        self._settings = settings
        self._processing = processing
        model: Any = load_model(
            settings.model_path,
            dtype=torch_dtype(settings.dtype),
            trust_remote_code=settings.trust_remote_code,
            override_config={},
        )
        if settings.fp32_logits and settings.dtype != "fp32":
            use_float32_logits(model)
        self._device = torch.device(device)
        self._model: Any = model.to(self._device).eval().requires_grad_(False)
        self._decoder_is_current = False
        self._decoder: FusedDecoder | None = None
        self._eos_token_ids = frozenset(processing.eos_token_ids)
        self._banned = torch.tensor(processing.banned_token_ids, dtype=torch.long, device=self._device)

    def generate(
        self, requests: Sequence[GenerationRequest], settings: SamplingSettings, on_finished: OnFinished | None = None
    ) -> list[list[Generation]]:
        check_lengths(requests, settings, self._settings.max_model_len)
        results: list[list[Generation]] = [[] for _ in requests]
        copies = settings.num_samples if settings.temperature == 0 else 1  # greedy samples are equal
        rows = self._rows(requests, settings)
        num_responses = len(requests) * settings.num_samples
        with Progress("sampling responses", num_responses, draws=not self._settings.disable_tqdm) as progress:
            batch = self._decoded_batch(rows, settings)
            while batch:
                for row in batch:
                    generation = Generation.of(row.tokens, row.log_probs, finished=row.finished)
                    results[row.request].append(generation)
                progress.update(copies * len(batch))
                for index in sorted({row.request for row in batch}):
                    if len(results[index]) * copies == settings.num_samples:
                        results[index] = results[index] * copies
                        if on_finished is not None:
                            on_finished(index, results[index])
                batch = self._decoded_batch(rows, settings)
        return results

    def _decoded_batch(self, rows: Iterator[_Row], settings: SamplingSettings) -> list[_Row]:
        with torch.inference_mode():
            batch = list(itertools.islice(rows, self._settings.batch_size))
            if batch and _is_plain(batch[0].prompt):
                self._decode(batch, settings)
                return batch
            # Padding would affect a layer with a window or a recurrent state, so each prompt's samples are alone.
            for _, request_rows in itertools.groupby(batch, key=lambda row: row.request):
                self._decode(list(request_rows), settings)
        return batch

    def sync_weights(self, weights: Weights) -> None:
        self._drop_decoder()
        if isinstance(weights, AdapterWeights):
            self._load_adapter(weights)
        else:
            self._load_full(weights)

    def rest(self) -> None:
        """Frees the decoder's copy of the weights, which the next call makes again; keys and values live in one call."""
        self._drop_decoder()

    def close(self) -> None:
        self._model = None
        self._drop_decoder()
        gc.collect()
        torch.cuda.empty_cache()

    def _drop_decoder(self) -> None:
        self._decoder = None
        self._decoder_is_current = False

    def _rows(self, requests: Sequence[GenerationRequest], settings: SamplingSettings) -> Iterator[_Row]:
        """Computes the prompts one by one, each only when a batch has room for its samples."""
        num_samples = settings.num_samples if settings.temperature > 0 else 1
        for index, request in enumerate(requests):
            prompt = self._read_prompt(request)
            for sample in range(num_samples):
                uniforms = row_uniforms(request.seed, sample, settings.max_response_length)
                yield _Row(request=index, prompt=prompt, uniforms=uniforms)

    def _read_prompt(self, request: GenerationRequest) -> _Prompt:
        processing = self._processing
        images = processing.load_images(request.images, videos=request.videos)
        token_ids = processing.expand(request.prompt_ids, images)
        encoded = EncodedPrompt(token_ids=tuple(token_ids), engine_ids=request.prompt_ids, images=images)
        positions = processing.positions(encoded)  # (3, L)
        input_ids = torch.tensor([token_ids], device=self._device)  # (1, L)
        inputs: dict[str, Any] = dict(processing.family.token_inputs(input_ids, self._model.config))
        if images is not None:
            for name, tensor in images.tensors.items():
                inputs[name] = tensor.to(self._device)
        position_ids = positions[:, None, :].to(self._device)  # (3, 1, L)
        output = self._model(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            position_ids=position_ids if processing.family.num_position_axes > 1 else position_ids[0],
            use_cache=True,
            logits_to_keep=1,
            **inputs,
        )
        return _Prompt(
            cache=output.past_key_values,
            length=len(token_ids),
            logits=output.logits[:, -1].float(),
            next_position=int(positions.max()) + 1,
        )

    def _decode(self, rows: list[_Row], settings: SamplingSettings) -> None:
        decoding = self._begin(rows)
        active = rows
        logits = torch.cat([row.prompt.logits for row in active])  # (B, V)
        uniforms = torch.stack([row.uniforms for row in active]).to(self._device)  # (B, T)
        positions = torch.tensor([row.prompt.next_position for row in active], device=self._device)  # (B,)
        for step in range(settings.max_response_length):
            outputs = [row.tokens for row in active]
            tokens = draw_tokens(logits, outputs, uniforms[:, step], self._banned, settings)  # (B,)
            log_probs = logits.log_softmax(dim=1).gather(1, tokens[:, None])[:, 0]  # (B,)
            for row, token, log_prob in zip(active, tokens.tolist(), log_probs.tolist(), strict=True):
                if not row.finished:
                    row.tokens.append(token)
                    row.log_probs.append(log_prob)
                    row.finished = self._is_end(row.tokens) and not settings.ignore_eos
            unfinished = [index for index, row in enumerate(active) if not row.finished]
            if not unfinished or step + 1 == settings.max_response_length:
                return
            if len(unfinished) <= _SHARE_THAT_GOES_ON * len(active):
                unfinished_rows = torch.tensor(unfinished, device=self._device)
                decoding.select(unfinished_rows)
                active = [active[index] for index in unfinished]
                tokens = tokens[unfinished_rows]
                uniforms = uniforms[unfinished_rows]
                positions = positions[unfinished_rows]
            logits = decoding.logits(tokens, positions + step).float()

    def _is_end(self, tokens: Sequence[int]) -> bool:
        return tokens[-1] in self._eos_token_ids or self._processing.is_ended_by_text(tokens)

    def _begin(self, rows: Sequence[_Row]) -> FusedDecoding | _PlainDecoding:
        if not self._decoder_is_current:
            self._decoder = fused_decoder(self._model)
            self._decoder_is_current = True
        if self._decoder is None:
            return _PlainDecoding(self._model, rows, three_axes=self._processing.family.num_position_axes > 1)
        prompts: list[list[tuple[Tensor, Tensor]]] = []  # the keys and values of each layer, once for each request
        prompt_numbers: dict[int, int] = {}
        for row in rows:
            if row.request not in prompt_numbers:
                prompt_numbers[row.request] = len(prompts)
                prompts.append([(layer.keys, layer.values) for layer in row.prompt.cache.layers])
        return FusedDecoding(self._decoder, prompts, [prompt_numbers[row.request] for row in rows])

    def _load_adapter(self, weights: AdapterWeights) -> None:
        import peft

        try:
            if not isinstance(self._model, peft.PeftModel):
                settings = {key: value for key, value in weights.adapter_config.items() if key != "peft_type"}
                settings["inference_mode"] = True
                config = peft.LoraConfig(**settings)  # type: ignore[arg-type]
                self._model = peft.get_peft_model(self._model, config).eval()
            _check_names("adapter", set(peft.get_peft_model_state_dict(self._model)), set(weights.tensors))
            peft.set_peft_model_state_dict(self._model, dict(weights.tensors))
        except EngineError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            raise EngineError(f"the adapter does not fit the model: {error}") from error

    def _load_full(self, weights: FullWeights) -> None:
        model_weights = self._model.state_dict()
        _check_names("full", set(model_weights), set(weights.tensors))
        for name, tensor in weights.tensors.items():  # one at a time: each may be gathered when read
            model_weight = model_weights[name]
            if tensor.shape != model_weight.shape:
                shapes = f"{tuple(tensor.shape)} for {tuple(model_weight.shape)}"
                raise EngineError(f"the full weights do not fit the model: size mismatch for {name}, {shapes}")
            model_weight.copy_(tensor)


def _check_names(kind: str, expected: set[str], received: set[str]) -> None:
    missing = sorted(expected - received)
    unknown = sorted(received - expected)
    if missing or unknown:
        raise EngineError(
            f"the {kind} weights do not fit the model: {len(missing)} of its {len(expected)} tensors are missing "
            f"({', '.join(missing[:3])}), {len(unknown)} are unknown to it ({', '.join(unknown[:3])})"
        )


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    """A computed prompt: its transformers cache and length, the logits after its last token, and the next position."""

    cache: Any = field(repr=False)
    length: int
    logits: Tensor = field(repr=False)
    next_position: int


@dataclass(kw_only=True)
class _Row:
    """One response. All samples of a request share its prompt."""

    request: int
    prompt: _Prompt
    uniforms: Tensor
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finished: bool = False


def _is_plain(prompt: _Prompt) -> bool:
    """Returns whether each layer keeps all keys and values, so that prompts of any lengths can share a padded cache."""
    from transformers.cache_utils import DynamicLayer

    return all(type(layer) is DynamicLayer for layer in prompt.cache.layers)


class _PlainDecoding:
    """Decodes with the model's own forward pass: prompts padded on the left, or samples of one prompt of any kind."""

    def __init__(self, model: Any, rows: Sequence[_Row], *, three_axes: bool) -> None:
        self._model = model
        self._three_axes = three_axes
        self._mask: Tensor | None = None
        first_prompt = rows[0].prompt
        if _is_plain(first_prompt):
            self._cache, self._mask = _joined(rows, model.config.get_text_config())
        else:
            # All rows are samples of one prompt, so each gets a copy of its cache's only row.
            self._cache: Any = copy.deepcopy(first_prompt.cache)
            self._cache.reorder_cache(torch.zeros(len(rows), dtype=torch.long, device=first_prompt.logits.device))

    def logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Computes one token per row at its position, and returns the logits of the next, (rows, vocabulary)."""
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        position_ids = positions[:, None]  # (B, 1)
        if self._three_axes:
            position_ids = position_ids.expand(3, -1, -1)  # (3, B, 1): text has the same position on each axis
        output = self._model(
            input_ids=tokens[:, None],
            attention_mask=self._mask,
            position_ids=position_ids,
            past_key_values=self._cache,
            use_cache=True,
        )
        return output.logits[:, -1]

    def select(self, rows: Tensor) -> None:
        self._cache.reorder_cache(rows)
        if self._mask is not None:
            self._mask = self._mask[rows]


def _joined(rows: Sequence[_Row], text_config: Any) -> tuple[Any, Tensor]:
    """Concatenates the rows' prompt caches, padded on the left; also returns the mask (rows, longest prompt)."""
    from transformers import DynamicCache

    prompts = [row.prompt for row in rows]
    longest = max(prompt.length for prompt in prompts)
    lengths = torch.tensor([prompt.length for prompt in prompts], device=prompts[0].logits.device)
    padding = longest - lengths[:, None]  # (B, 1)
    mask = (torch.arange(longest, device=lengths.device) >= padding).long()  # (B, longest)
    cache = DynamicCache(config=text_config)
    for index in range(len(prompts[0].cache.layers)):
        layers = [prompt.cache.layers[index] for prompt in prompts]
        keys = torch.cat([_padded_left(layer.keys, longest) for layer in layers])
        values = torch.cat([_padded_left(layer.values, longest) for layer in layers])
        cache.update(keys, values, index)
    return cache, mask


def _padded_left(states: Tensor, length: int) -> Tensor:
    """Pads keys or values (1, heads, tokens, size) with zeros before the first token."""
    return pad(states, (0, 0, length - states.shape[2], 0))


def row_uniforms(seed: int, sample: int, count: int) -> Float[Tensor, " T"]:
    """Returns the first `count` float64 numbers in [0, 1) of a sequence that depends only on (seed, sample)."""
    digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest()
    # torch uses the low 32 bits of a CPU generator's seed.
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") & 0xFFFFFFFF)
    return torch.rand(count, generator=generator, dtype=torch.float64)


def draw_tokens(
    logits: Float[Tensor, "B V"],
    outputs: Sequence[Sequence[int]],
    uniforms: Float[Tensor, " B"],
    banned: Int64[Tensor, " N"],
    settings: SamplingSettings,
) -> Int64[Tensor, " B"]:
    """Draws the token at which the cumulative distribution, in token-id order, first exceeds the row's uniform number.

    With temperature 0 it is the likeliest allowed token. A token of probability 0 is never drawn. `outputs` are the
    tokens that each row's response already contains. Raises `EngineError`: a logit is NaN or infinite.
    """
    if settings.presence_penalty != 0:
        logits = logits.clone()
        for row, output in zip(logits, outputs, strict=True):
            present = torch.tensor(sorted(set(output)), dtype=torch.long, device=row.device)
            row[present] -= settings.presence_penalty
    if settings.temperature == 0:
        highest, tokens = logits.index_fill(1, banned, float("-inf")).max(dim=1)  # both (B,); a NaN is the highest
        _check_numbers(highest)
        return tokens
    probabilities = _allowed(logits, banned, settings).softmax(dim=1)  # (B, V)
    return _tokens_at(probabilities, uniforms)


def _check_numbers(results: Float[Tensor, " B"]) -> None:
    """Checks one result of each row, which is a number only if all the row's logits are."""
    if not bool(results.isfinite().all()):
        raise EngineError(
            "the model's logits are not finite numbers (NaN or infinity); check its weights and the data type it "
            "computes in"
        )


def _tokens_at(probabilities: Float[Tensor, "B V"], uniforms: Float[Tensor, " B"]) -> Int64[Tensor, " B"]:
    """Returns the first token of each row at which the sum of probabilities exceeds `uniforms` times their whole sum.

    The token is searched among blocks and then within one block: a cumulative sum over a large vocabulary would take as
    long as a dozen layers. Sums of blocks are float64, the sum of each block is float32.
    """
    num_rows, vocabulary_size = probabilities.shape
    padded = pad(probabilities, (0, -vocabulary_size % _BLOCK))
    blocks = padded.view(num_rows, -1, _BLOCK)  # (B, n, _BLOCK)
    ends = blocks.sum(dim=2).cumsum(dim=1, dtype=torch.float64)  # (B, n), the sum up to the end of each block
    starts = pad(ends, (1, 0))  # (B, n + 1)
    total = ends[:, -1]
    _check_numbers(total)
    points = _below(uniforms * total, total)
    block = _first_above(ends, points)
    rows = torch.arange(num_rows, device=probabilities.device)
    sums = blocks[rows, block].cumsum(dim=1, dtype=torch.float64)  # (B, _BLOCK), within the row's block
    points_in_block = _below(points - starts[rows, block], sums[:, -1])
    return block * _BLOCK + _first_above(sums, points_in_block)


def _first_above(sums: Float[Tensor, "B n"], points: Float[Tensor, " B"]) -> Int64[Tensor, " B"]:
    """Returns the index of each row's first sum above its point."""
    return torch.searchsorted(sums, points[:, None], right=True)[:, 0]


def _below(points: Float[Tensor, " B"], sums: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Bounds points by the number before each sum, so that even a rounded point is at a token of positive probability."""
    return torch.minimum(points, torch.nextafter(sums, torch.zeros_like(sums)))


def _allowed(logits: Tensor, banned: Tensor, settings: SamplingSettings) -> Tensor:
    """Divides the logits by the temperature, which is above 0, and sets those of tokens that may not be drawn to -inf.

    Excludes first the banned tokens, then all but the `top_k` likeliest, and then all but the likeliest tokens that
    together reach the probability `top_p`. The likeliest token that is not banned always remains.
    """
    logits = logits / settings.temperature
    logits.index_fill_(1, banned, float("-inf"))
    if 0 < settings.top_k < logits.shape[1]:
        threshold = logits.topk(settings.top_k, dim=1).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    if settings.top_p < 1:
        ordered, order = logits.sort(dim=1, descending=True)
        probabilities = ordered.softmax(dim=1, dtype=torch.float64)
        likelier = probabilities.cumsum(dim=1) - probabilities  # the probability of all likelier tokens together
        excluded: Bool[Tensor, "B V"] = likelier >= settings.top_p
        excluded[:, 0] = False
        excluded_by_token = torch.zeros_like(excluded).scatter(1, order, excluded)
        logits = logits.masked_fill(excluded_by_token, float("-inf"))
    return logits
