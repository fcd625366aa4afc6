"""Computes token log-probabilities from hidden states, with the LM head applied to chunks of tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cepo.errors import ConfigError
from cepo.losses.recomputation import recomputed_in_chunks
from cepo.models.cpu.matrix_products import in_whole_blocks, linear, multiply, weight_gradient

logger = logging.getLogger(__name__)

_VOCABULARY_BLOCK = 2**22
"""The number of 16-bit head weights converted to float32 at once on devices whose products cannot return float32."""

HEAD_CHUNK_ELEMENTS = 2**25
HEAD_CHUNK_ELEMENTS_ON_GPU = 2**28
"""The number of logits in memory at once: 128 MiB in float32, and 1 GiB on a GPU, where reading the weights is then no
bottleneck. A chunk has this many elements / vocabulary tokens."""

DIVERGENCE_CHUNK_ELEMENTS = 9 * 2**20
DIVERGENCE_CHUNK_ELEMENTS_ON_GPU = 2**26
"""The same for a divergence, which holds both distributions, their mixture and their gradients at once, up to 14 tensors of
this size (3.5 GiB on a GPU). A chunk exceeds 32 MiB: glibc keeps freed blocks up to that size on its heap, where they would
add up to a dense computation's memory."""


KERNEL_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""The largest accepted difference between kernel and torch at the first use on a device, for each supported type. The
relative error of a GPU's exponential and logarithm is 2e-7, which is about 1e-5 for log-probs of -20."""


class Float32LogitsHead(nn.Linear):
    """Computes float32 logits `z = W h + b` from a weight and hidden states of any type, accumulated in float32.

    The product of two 16-bit numbers is exact in float32, so devices differ only in the order of summation. In bf16,
    logits from 16 to 32 would be rounded to multiples of 0.125, an error that the log-probs would inherit.
    """

    def forward(self, input: Tensor) -> Tensor:
        logits = float32_logits(input, self.weight)
        return logits if self.bias is None else logits + self.bias.float()


def use_float32_logits(model: Any) -> None:
    """Replaces the LM head of `model`, a plain linear layer, by a `Float32LogitsHead` with the same weight, tied or not."""
    head = model.lm_head
    if type(head) is not nn.Linear:
        raise ConfigError(
            f"worker.actor.model.fp32_logits is true, but the language head of {type(model).__name__} is a "
            f"{type(head).__name__} and not a linear layer; set worker.actor.model.fp32_logits=false"
        )
    replacement = Float32LogitsHead(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
    replacement.weight = head.weight
    replacement.bias = head.bias
    model.lm_head = replacement.train(head.training)


class CappedHead(nn.Module):
    """Computes `cap * tanh(z / cap)` of the logits `z` of an LM head, which stays a part of its model.

    transformers caps the logits in the model's forward pass and not in its head; vLLM does it behind its own.
    """

    def __init__(self, head: nn.Module, cap: float) -> None:
        super().__init__()
        self.head = head
        self.cap = cap

    @property
    def weight(self) -> Any:
        """The weight (V, H) of the head."""
        return self.head.weight

    def forward(self, hidden: Float[Tensor, "*N H"]) -> Float[Tensor, "*N V"]:
        return capped(self.head(hidden), self.cap)


def capped(logits: Float[Tensor, "*N V"], cap: float) -> Float[Tensor, "*N V"]:
    """Returns `cap * tanh(logits / cap)`, which lies within -cap and cap; the logits keep their type."""
    return torch.tanh(logits / cap) * cap


def output_head(model: Any) -> Any:
    """Returns the function from the last hidden states of `model`, a Hugging Face model, to its logits.

    It is the model's LM head, or a `CappedHead` with it if the configuration has `final_logit_softcapping`.
    """
    cap: float | None = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return model.lm_head if cap is None else CappedHead(model.lm_head, cap)


def replaced_weight(head: nn.Module, weight: Float[Tensor, "V H"]) -> Tensor | Callable[[Tensor], Tensor]:
    """Returns a model's output head with another weight, for `cepo.losses.divergence`; logits keep their type and cap."""
    if isinstance(head, CappedHead):
        inner = replaced_weight(head.head, weight)
        logits = partial(nn.functional.linear, weight=inner) if isinstance(inner, Tensor) else inner
        return lambda hidden: capped(logits(hidden), head.cap)
    if isinstance(head, Float32LogitsHead):
        return partial(float32_logits, weight=weight)
    return weight


def float32_logits(hidden: Float[Tensor, "*N H"], weight: Float[Tensor, "V H"]) -> Float[Tensor, "*N V"]:
    """Computes a differentiable `hidden @ weight.T` in float32; both operands are float32, bf16 or fp16."""
    if weight.dtype is torch.float32:
        return linear(hidden, weight)
    flat_hidden = hidden.reshape(-1, hidden.shape[-1])  # (n, H)
    logits: Any = _Float32Product.apply(flat_hidden, weight)
    return logits.view(*hidden.shape[:-1], len(weight))


class _Float32Product(torch.autograd.Function):
    """Computes gradients in the operands' own type, as `linear` does."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(hidden, weight)
        return _float32_product(hidden, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad
        rounded = gradient.to(weight.dtype)
        to_hidden = rounded @ weight if needs_hidden else None
        to_weight = rounded.t() @ hidden if needs_weight else None
        return to_hidden, to_weight


def _float32_product(hidden: Float[Tensor, "n H"], weight: Float[Tensor, "V H"]) -> Float[Tensor, "n V"]:
    if weight.dtype is torch.float32:
        return linear(hidden, weight)
    if hidden.device.type == "cuda":
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    vocabulary_size, hidden_size = weight.shape
    logits = torch.empty(len(hidden), vocabulary_size, dtype=torch.float32, device=hidden.device)
    float32_hidden = hidden.float()
    rows_per_block = max(1, _VOCABULARY_BLOCK // hidden_size)
    for block in chunks(vocabulary_size, rows_per_block):
        float32_weight = weight[block].float()
        logits[:, block] = float32_hidden @ float32_weight.t()
    return logits


def target_log_probs(
    hidden: Float[Tensor, "N H"],
    head: nn.Module,
    targets: Int64[Tensor, " N"],
    *,
    temperature: float,
    chunk_tokens: int,
) -> Float[Tensor, " N"]:
    """Computes the log-probabilities of `targets`: `z_n[y_n] - logsumexp(z_n)` with `z_n = head(h_n) / temperature`.

    The result is float32, from logits of the head's own type. No tensor of tokens x vocabulary outlives its chunk of
    `chunk_tokens`, forward or backward.

    The gradient in a hidden state is `W^T (onehot(y_n) - P_n) / temperature` times the incoming gradient. Under a
    frozen head the forward pass computes it up to that factor, so the backward pass needs no product with the
    vocabulary. For a trained head each chunk's logits are recomputed, and its gradient is summed in float32.
    """
    weight: Any = head.weight
    if not is_plain(head):
        return _by_recomputation(hidden, head, targets, temperature, chunk_tokens)
    ahead = torch.is_grad_enabled() and hidden.requires_grad and not weight.requires_grad
    product = logits_product(head)
    num_tokens = len(targets)
    hidden, targets, chunk_tokens = in_whole_blocks(hidden, targets, chunk_tokens, weight)
    log_probs: Any = _LogProbs.apply(hidden, weight, targets, product, temperature, chunk_tokens, ahead)
    return log_probs[:num_tokens].clone()  # FSDP hooks no views


def is_plain(head: nn.Module) -> bool:
    """Whether a head computes `W h` and nothing else, so that its gradient is known without autograd."""
    return type(head) in (nn.Linear, Float32LogitsHead) and head.bias is None


def logits_product(head: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the function of (hidden states, weight) that computes a plain head's logits in the head's own type."""
    return _float32_product if isinstance(head, Float32LogitsHead) else linear


class _LogProbs(torch.autograd.Function):
    """`product` computes the logits; with `ahead` the forward pass prepares the gradient of the hidden states."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        product: Callable[[Tensor, Tensor], Tensor],
        temperature: float,
        chunk_tokens: int,
        ahead: bool,
    ) -> Tensor:
        log_probs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        directions = torch.empty_like(hidden) if ahead else None  # (N, H)
        for chunk in chunks(len(targets), chunk_tokens):
            logits = product(hidden[chunk], weight)  # (n, V)
            log_probs[chunk] = log_probs_in_place(logits, targets[chunk], temperature, with_direction=ahead)
            if directions is not None:
                directions[chunk] = multiply(logits.to(weight.dtype), weight)
        if directions is None:
            ctx.save_for_backward(hidden, weight, targets)
        else:
            ctx.save_for_backward(directions)
        ctx.product = product
        ctx.temperature = temperature
        ctx.chunk_tokens = chunk_tokens
        ctx.ahead = ahead
        return log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        no_gradients = (None,) * 5  # for targets, product, temperature, chunk_tokens and ahead
        factors = (gradient / ctx.temperature).unsqueeze(1)  # (N, 1)
        if ctx.ahead:
            (directions,) = ctx.saved_tensors
            to_hidden = (factors * directions).to(directions.dtype)
            return to_hidden, None, *no_gradients
        hidden, weight, targets = ctx.saved_tensors
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for chunk in chunks(len(targets), ctx.chunk_tokens):
            logits = ctx.product(hidden[chunk], weight)  # (n, V)
            log_probs_in_place(logits, targets[chunk], ctx.temperature, with_direction=True)
            to_logits = logits.mul_(factors[chunk]).to(weight.dtype)
            to_hidden[chunk] = multiply(to_logits, weight)
            to_weight += weight_gradient(to_logits, hidden[chunk])
        return to_hidden, to_weight.to(weight.dtype), *no_gradients


def log_probs_in_place(
    logits: Float[Tensor, "n V"], targets: Int64[Tensor, " n"], temperature: float, *, with_direction: bool
) -> Float[Tensor, " n"]:
    """Computes log P of the targets in float32, with `P = softmax(logits / temperature)`.

    `logits` is overwritten; with `with_direction` it holds `onehot(target) - P` afterwards, in its own type.
    """
    if _kernel_works(logits.device, logits.dtype):
        from cepo.models import head_kernel  # needs Triton

        return head_kernel.log_probs_in_place(logits, targets, temperature, with_direction=with_direction)
    return _log_probs_by_torch(logits, targets, temperature, with_direction=with_direction)


def _log_probs_by_torch(logits: Tensor, targets: Tensor, temperature: float, *, with_direction: bool) -> Tensor:
    scaled = logits.float()  # (n, V)
    target_index = targets.unsqueeze(1)  # (n, 1)
    if temperature != 1:
        scaled.div_(temperature)
    highest = scaled.amax(dim=1, keepdim=True)
    at_target = scaled.gather(1, target_index) - highest
    scaled.sub_(highest).exp_()
    total = scaled.sum(dim=1, keepdim=True)
    log_probs = (at_target - total.log()).squeeze(1)  # (n,)
    if with_direction:
        scaled.div_(total.neg_())
        scaled.scatter_add_(1, target_index, torch.ones_like(at_target))
        if scaled is not logits:
            logits.copy_(scaled)
    return log_probs


@cache
def _kernel_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether the kernel may be used: on a GPU, with Triton, if it computes what torch does from small logits.

    If it does not, or if it fails, a warning says that torch computes log-probs.
    """
    if device.type != "cuda" or dtype not in KERNEL_TOLERANCE or find_spec("triton") is None:
        return False

    def by_kernel(*arguments: Any, **options: Any) -> Tensor:
        from cepo.models import head_kernel  # within the trial, since Triton may fail as it is loaded

        return head_kernel.log_probs_in_place(*arguments, **options)

    return kernel_agrees(device, dtype, by_kernel)


def kernel_agrees(device: torch.device, dtype: torch.dtype, log_probs_by_kernel: Callable[..., Tensor]) -> bool:
    """Returns whether a kernel in place of `_log_probs_by_torch` computes the same; logs a warning if not."""
    angles = torch.linspace(-9.0, 9.0, 3 * 5000, device=device).view(3, 5000)
    logits = angles.sin_().mul_(8.0).to(dtype)
    targets = torch.tensor([0, 4999, 77], device=device)
    expected_directions = logits.clone()
    expected = _log_probs_by_torch(expected_directions, targets, 0.7, with_direction=True)
    try:
        log_probs = log_probs_by_kernel(logits, targets, 0.7, with_direction=True)
    except (RuntimeError, ImportError, OSError) as error:  # no compiler, or a kernel this device cannot run
        logger.warning("log-probs are computed by torch: the kernel fails (%s: %s)", type(error).__name__, error)
        return False
    gaps = torch.cat([log_probs - expected, (logits - expected_directions).flatten()])
    gap = float(gaps.abs().max())
    agrees = gap <= KERNEL_TOLERANCE[dtype]  # False for a gap that is no number
    if not agrees:
        logger.warning("log-probs are computed by torch: the kernel differs by %.1e in %s", gap, dtype)
    return agrees


def _by_recomputation(
    hidden: Tensor, head: nn.Module, targets: Tensor, temperature: float, chunk_tokens: int
) -> Tensor:
    """Computes `target_log_probs` for other heads, such as one with an adapter; the backward pass recomputes chunks."""

    def log_probs_of(hidden: Tensor, targets: Tensor) -> tuple[Tensor]:
        log_probs, _ = vocabulary_log_probs(hidden, head, targets, temperature)
        return (log_probs.float(),)

    (log_probs,) = recomputed_in_chunks(log_probs_of, (hidden, targets), chunk_tokens)
    return log_probs


def vocabulary_log_probs(hidden: Tensor, head: nn.Module, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Returns the log-probs of the targets, and those of the whole vocabulary: float32, or float64 from float64 logits."""
    logits = head(hidden)
    logits = (logits if logits.dtype is torch.float64 else logits.float()) / temperature
    log_p = logits.log_softmax(dim=1)  # (n, V)
    log_probs = log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
    return log_probs, log_p


def chunks(count: int, size: int) -> list[slice]:
    """Returns the parts of `count` tokens, of `size` each but for the last."""
    return [slice(start, start + size) for start in range(0, count, size)]


def head_chunk_tokens(device: torch.device, vocabulary: int) -> int:
    elements = HEAD_CHUNK_ELEMENTS if device.type == "cpu" else HEAD_CHUNK_ELEMENTS_ON_GPU
    return max(1, elements // vocabulary)


def divergence_chunk_tokens(device: torch.device, vocabulary: int) -> int:
    elements = DIVERGENCE_CHUNK_ELEMENTS if device.type == "cpu" else DIVERGENCE_CHUNK_ELEMENTS_ON_GPU
    return max(1, elements // vocabulary)
