"""Adds a LoRA adapter to a model: checks which layers its settings name, and computes those layers in fewer passes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.nn.functional import linear

from cepo.config.worker_schema import ActorConfig, LoraConfig
from cepo.errors import ConfigError, did_you_mean
from cepo.hardware import drawing_devices
from cepo.models import pretrained

ALL_LINEAR = "all-linear"


def add_adapter(model: nn.Module, lora: LoraConfig, *, dtype: torch.dtype, seed: int) -> Any:
    """Wraps the model in PEFT with a LoRA adapter whose weights are of `dtype`, drawn from `seed`.

    Raises:
        ConfigError: `target_modules` and `exclude_modules` leave no layer, or a name of `target_modules` matches none, or
            embeddings or the head.
    """
    excluded = pretrained.excluded_from_adapter(lora, model.config)
    names = target_names(lora.target_modules)
    require_targets(model, names, excluded=excluded)
    settings = PeftLoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        use_dora=lora.use_dora,
        target_modules=names or lora.target_modules,
        exclude_modules=excluded,
    )
    with torch.random.fork_rng(devices=drawing_devices()):
        torch.manual_seed(seed)
        try:
            wrapped = get_peft_model(model, settings, autocast_adapter_dtype=False)  # pyright: ignore[reportArgumentType]
        except ValueError as error:
            raise ConfigError(f"worker.actor.model.lora: {error}") from error
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    if not lora.use_dora:
        fuse_adapters(wrapped)
    return wrapped


def check_adapter_targets(config: ActorConfig) -> None:
    """Checks the settings as `add_adapter` does, without reading weights."""
    settings = config.model
    names = target_names(settings.lora.target_modules)
    if not names:
        return
    model: Any = pretrained.load_model(
        settings.model_path,
        dtype=pretrained.torch_dtype(config.fsdp.mp_param_dtype),
        trust_remote_code=settings.trust_remote_code,
        override_config=settings.override_config,
        with_weights=False,
    )
    excluded = pretrained.excluded_from_adapter(settings.lora, model.config)
    require_targets(model, names, excluded=excluded)


def target_names(target_modules: str) -> list[str]:
    """Splits the setting into module names: none for `all-linear`."""
    if target_modules == ALL_LINEAR:
        return []
    return [name.strip() for name in target_modules.split(",")]


def require_targets(model: nn.Module, names: Sequence[str], *, excluded: str | None) -> None:
    """Raises ConfigError unless each name matches a layer that is not excluded, and none matches embeddings or the head.

    As in PEFT, which would ignore a name without a layer, a name matches paths that equal it or end with it; `excluded`
    is a regular expression for whole paths.
    """
    adaptable: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if not re.fullmatch(excluded or "$", path):  # "$" excludes the whole model, whose path is empty
            adaptable[path] = module
    unsupported = _embeddings_and_head(model)
    for name in names:
        paths = [path for path in adaptable if f".{path}".endswith(f".{name}")]
        if not paths:
            problem = f"'{name}' fits no layer of this model"
            if excluded is not None:
                problem += f" outside of exclude_modules '{excluded}'"
        elif any(adaptable[path] in unsupported for path in paths):
            problem = f"'{name}' fits {paths[0]}, and embeddings and the language head get no adapter"
        else:
            continue
        linear_names: set[str] = set()
        for path, module in adaptable.items():
            if isinstance(module, nn.Linear) and module not in unsupported:
                linear_names.add(path.rpartition(".")[2])
        suggestions = sorted(linear_names)
        raise ConfigError(
            f"worker.actor.model.lora.target_modules: {problem}.{did_you_mean(name, suggestions)} Its linear layers: "
            f"{', '.join(suggestions)}; {ALL_LINEAR} takes all of them"
        )


def _embeddings_and_head(model: Any) -> set[nn.Module]:
    """Returns the modules whose weights many models tie, so that adapters on them would part what is one weight."""
    modules: set[nn.Module] = set()
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        if part is not None:
            modules.update(part.modules())
    return modules


def fuse_adapters(model: nn.Module) -> None:
    """Converts the LoRA layers over plain linear ones to `FusedLoraLinear`, in a model with one adapter of `add_adapter`."""
    for module in model.modules():
        if type(module) is Linear and type(module.base_layer) is nn.Linear:
            # The class alone changes: a new module would need another name for its weights, or copies of them.
            module.__class__ = FusedLoraLinear


class FusedLoraLinear(Linear):
    """Computes `W x + scaling * B A x` by accumulating the second product into the first.

    PEFT's layer computes, scales and adds `B A x` in three tensors of the output's size, and also scales the gradient.
    Here, weights, names and gradients are the same, but the sum is rounded once instead of three times. The adapter has
    neither dropout nor a bias. Without it, PEFT's layer computes.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters or args or kwargs:
            return super().forward(x, *args, **kwargs)
        (name,) = self.active_adapters
        *leading_sizes, input_size = x.shape
        flat = x.reshape(-1, input_size)  # (N, in)
        base: Any = self.base_layer
        down: Any = self.lora_A[name]
        up: Any = self.lora_B[name]
        # The in-place sum needs a tensor that is not a view, because autograd would copy the gradient of a view.
        result: Tensor = base(flat)  # (N, out)
        low_rank = linear(flat, down.weight)  # (N, rank)
        result.addmm_(low_rank, up.weight.t(), alpha=self.scaling[name])
        return result.view(*leading_sizes, result.shape[-1])
