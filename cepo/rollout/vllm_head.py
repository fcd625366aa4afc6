"""vLLM's language head in float32: the trainer's log-probs are compared with the engine's, so both round their logits alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cepo.errors import EngineError

if TYPE_CHECKING:
    from vllm import LLM


FLOAT32_HEAD = {"head_dtype": "float32"}
"""For vLLM's `hf_overrides`. On a GPU it takes a product of 16-bit operands that returns float32; elsewhere it casts both."""


def require_float32_head(llm: LLM) -> None:
    """Checks what vLLM made of it.

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
    """In vLLM's worker: the types that its language heads return logits in."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    modules = worker.model_runner.get_model().modules()
    return {str(module.head_dtype) for module in modules if isinstance(module, LogitsProcessor)}
