"""Loads new weights into a running vLLM engine, tensor by tensor, without files or a second full copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from cepo.errors import EngineError
from cepo.models.families import family_of
from cepo.rollout.generator import AdapterWeights, FullWeights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from vllm import LLM


def load_full(llm: LLM, weights: FullWeights) -> None:
    """Overwrites the engine's weights one tensor at a time, as the mapping yields them."""
    config: PreTrainedConfig = llm.model_config.hf_config
    # Published checkpoints have this entry in the whole configuration, in its text part, or in both.
    tied = any(getattr(part, "tie_word_embeddings", False) for part in (config, config.get_text_config()))
    assert not tied or "lm_head.weight" in weights.tensors, (
        "a tied lm_head.weight is missing; vLLM's would stay as it was"
    )
    family = family_of(config)
    llm.collective_rpc(_forget_packed_experts)
    published = (family.published(name, weight) for name, weight in weights.tensors.items())
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": published})


def load_adapter(llm: LLM, weights: AdapterWeights, identifier: int) -> None:
    """Replaces all earlier adapters by this one, numbered `identifier`; the base weights are unchanged."""
    family = family_of(llm.model_config.hf_config)
    towers = sorted(name for name in weights.tensors if any(f".{part}." in name for part in family.vision_modules))
    if towers:
        raise EngineError(
            f"vLLM serves adapters of the language model only and would ignore {len(towers)} tensors, the first "
            f"'{towers[0]}'; set worker.actor.model.lora.exclude_modules='{family.vision_pattern}', or "
            "worker.rollout.name=transformers"
        )
    llm.collective_rpc(_load_adapter, args=(weights, identifier))


def clear_caches(llm: LLM) -> None:
    """Drops keys, values and image embeddings computed with older weights."""
    if not llm.reset_prefix_cache():
        raise EngineError("vLLM kept keys and values of the old weights, because requests are still being served")
    llm.reset_mm_cache()
    llm.llm_engine.reset_encoder_cache()


def _forget_packed_experts(worker: Any) -> None:
    """Drops packed experts, which vLLM's CPU build makes at the first load and would keep; runs in vLLM's worker."""
    if torch.cuda.is_available():
        return
    for module in worker.model_runner.model.modules():
        # Only vLLM's layers have a `quant_method`, and only that of its experts has a kernel.
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _load_adapter(worker: Any, weights: AdapterWeights, identifier: int) -> None:
    """Loads an adapter as vLLM does from a folder, but from tensors; runs in vLLM's worker."""
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
    _check_fit(adapter.loras, adapters)
    manager.remove_all_adapters()
    adapters.add_adapter(adapter)
    adapters.activate_adapter(identifier)


def _check_fit(pairs: Any, adapters: Any) -> None:
    served = set(adapters.modules).union(*adapters.packed_modules.values())
    misfits = [
        name
        for name, pair in sorted(pairs.items())
        if name not in served
        or pair.lora_a is None
        or pair.lora_b is None
        or not pair.lora_a.shape[0] == pair.rank == pair.lora_b.shape[1]
    ]
    if misfits:
        raise EngineError(
            f"the adapter does not fit the model: {len(misfits)} of its {len(pairs)} modules are unknown to vLLM or lack a "
            f"factor of their rank, the first {', '.join(misfits[:3])}"
        )
