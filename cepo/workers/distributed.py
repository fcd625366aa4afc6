"""Builds the trained models, sharded over a process group, and gathers their weights; a single process has a group too."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from cepo.config.worker_schema import ActorConfig, CriticConfig, FsdpConfig
from cepo.errors import ConfigError
from cepo.metrics import Metrics
from cepo.models import pretrained
from cepo.models.families import family_of
from cepo.models.head import use_float32_logits
from cepo.models.processing import Processing
from cepo.workers.scoring_model import ScoringModel, ValueModel


def build_scoring_model(config: ActorConfig, *, temperature: float, seed: int) -> ScoringModel:
    """Builds the sharded policy for scoring and training. Adapter weights are initialised from `seed`."""
    mesh = data_parallel_mesh(config.fsdp.fsdp_size)
    trained_dtype = pretrained.torch_dtype(config.fsdp.torch_dtype or "fp32")
    compute_dtype = pretrained.torch_dtype(config.fsdp.mp_param_dtype)
    with_adapter = config.model.lora.rank > 0
    quantization = pretrained.quantization_of(config.model.lora, dtype=compute_dtype)
    base = _load_model(config, "worker.actor.model", compute_dtype if with_adapter else trained_dtype, quantization)
    if config.model.fp32_logits and compute_dtype is not torch.float32:
        use_float32_logits(base)
    model = base
    if with_adapter:
        from cepo.workers.adapters import add_adapter  # PEFT takes a second to import

        model = add_adapter(base, config.model.lora, dtype=trained_dtype, seed=seed)
    scoring_model = ScoringModel(model, temperature=temperature)
    _distribute(scoring_model, base, config, mesh)
    return scoring_model


def build_value_model(config: CriticConfig, processing: Processing, *, seed: int) -> ValueModel:
    """Builds the sharded critic: the checkpoint with its LM head replaced by a value head initialised from `seed`."""
    mesh = data_parallel_mesh(config.fsdp.fsdp_size)
    model = _load_model(config, "worker.critic.model", pretrained.torch_dtype(config.fsdp.torch_dtype or "fp32"))
    _require_vocabulary(model, processing, config.model.model_path)
    del model.lm_head
    value_model = ValueModel(model, seed=seed)
    _distribute(value_model, model, config, mesh, exact=[value_model.head])
    return value_model


def _load_model(config: ActorConfig | CriticConfig, section: str, dtype: torch.dtype, quantization: Any = None) -> Any:
    settings = config.model
    assert settings.model_path is not None, "the critic's settings come resolved"
    model = pretrained.load_model(
        settings.model_path,
        dtype=dtype,
        trust_remote_code=settings.trust_remote_code,
        override_config=settings.override_config,
        section=section,
        with_weights=quantization is not None or not config.fsdp.enable_rank0_init or dist.get_rank() == 0,
        quantization=quantization,
    )
    if settings.freeze_vision_tower:
        pretrained.freeze_vision_tower(model, section=section)
    return model


def _require_vocabulary(model: Any, processing: Processing, path: str | None) -> None:
    """Raises ConfigError unless the model's image token and vocabulary size fit the tokens of `processing`."""
    image_token_id = family_of(model.config).placeholder_id(model.config)
    size, needed = model.get_input_embeddings().weight.shape[0], len(processing.tokenizer)
    if image_token_id != processing.placeholders[0] or size < needed:
        raise ConfigError(
            f"worker.critic.model.model_path={path} uses a different tokenizer than the actor: its image token is "
            f"{image_token_id} of {size}, the actor's is {processing.placeholders[0]} of {needed}. Name a checkpoint with "
            "the actor's tokenizer, or null for the actor's."
        )


def _distribute(
    root: ScoringModel | ValueModel,
    base: Any,
    config: ActorConfig | CriticConfig,
    mesh: DeviceMesh,
    *,
    exact: Sequence[nn.Module] = (),
) -> None:
    """Shards `root`, around the model `base`; if only the first rank has read the weights, it broadcasts them.

    Parts in `exact` compute in their storage type. A vision tower without gradient is replicated on every device in its
    compute type: its passes then need no other rank, and each rank caches the features of its own images. Packed 4-bit
    weights are replicated too, because their scales are separate; each rank reads them itself.
    """
    fsdp, device = config.fsdp, this_device()
    trained: Any = root.model
    if config.model.enable_gradient_checkpointing:
        trained.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        trained.enable_input_require_grads()
    whole_tower = pretrained.frozen_vision_parts(base)
    packed = pretrained.quantised_weights(root).values()
    from_first_rank = fsdp.enable_rank0_init and not packed
    kept_whole = [parameter for part in whole_tower for parameter in part.parameters()]
    for parameter in kept_whole:
        parameter.data = parameter.data.to(pretrained.torch_dtype(fsdp.mp_param_dtype))
    offload = CPUOffloadPolicy() if fsdp.enable_cpu_offload and device.type != "cpu" else OffloadPolicy()
    whole = root.state_dict() if from_first_rank and dist.get_rank() == 0 else {}
    blocks = pretrained.sharded_blocks(base, without=whole_tower)
    _shard(root, blocks, fsdp, mesh, offload, exact, ignored={*kept_whole, *packed})
    if from_first_rank:
        home = torch.device("cpu") if isinstance(offload, CPUOffloadPolicy) else device
        if dist.get_rank() != 0:  # with memory for weights on the meta device, and the values of the buffers
            buffers = {name: buffer.clone() for name, buffer in root.named_buffers()}
            root.to_empty(device=home)
            for name, buffer in root.named_buffers():
                buffer.copy_(buffers[name])
        else:
            for part in whole_tower:  # to the device of the shards, because a broadcast needs one device type
                part.to(home)
        set_model_state_dict(root, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    for part in whole_tower:
        part.to(device)


def _shard(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    fsdp: FsdpConfig,
    mesh: DeviceMesh,
    offload: OffloadPolicy,
    exact: Sequence[nn.Module],
    ignored: set[nn.Parameter],
) -> None:
    """Applies FSDP2: one group per repeated block, and the rest (embeddings, merger, head) in the root.

    Parameters in `ignored` remain whole. Each group moves to the mesh's device when it is sharded, so no device holds
    the whole model. Gradients are summed over ranks, not averaged (FSDP's default), because each rank's loss is its
    share of a sum with global denominators.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=pretrained.torch_dtype(fsdp.mp_param_dtype),
        reduce_dtype=pretrained.torch_dtype(fsdp.mp_reduce_dtype),
    )
    common: Any = {"mesh": mesh, "offload_policy": offload, "ignored_params": ignored}
    for part in exact:  # separate groups, because the root's policy would cast them
        fully_shard(part, **common)
    for block in blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=fsdp.enable_full_shard, **common)
    fully_shard(root, mp_policy=policy, reshard_after_forward=False, **common)
    for part in root.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo supports sums, but not scaled sums


def this_device() -> torch.device:
    """Returns this process's GPU if there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def process_group_backend(device: torch.device) -> str:
    """Returns the backend for `dist.init_process_group`; with GPUs, tensors in host memory need gloo besides NCCL."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def stay_on_loopback() -> None:
    """Makes gloo listen only on the loopback interface, for processes on one machine; a user's choice takes precedence.

    Otherwise gloo would listen on the address of the host name, to which anyone in the network can connect.
    """
    addresses = psutil.net_if_addrs()
    loopback = next(name for name in addresses if any(one.address == "127.0.0.1" for one in addresses[name]))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def data_parallel_mesh(fsdp_size: int) -> DeviceMesh:
    """Returns the device mesh of all processes; without a process group, starts one with a single process.

    Weights are sharded over one axis. If `fsdp_size` is positive and below the number of processes, which must be a
    multiple of it, there are two axes: replicas of the weights, each sharded over `fsdp_size` neighbouring processes.
    """
    device = this_device()
    if not dist.is_initialized():
        stay_on_loopback()
        dist.init_process_group(process_group_backend(device), store=dist.HashStore(), rank=0, world_size=1)
    size = dist.get_world_size()
    if fsdp_size <= 0 or fsdp_size >= size:
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (size // fsdp_size, fsdp_size), mesh_dim_names=("replicate", "shard"))


def on_first_rank(metrics: Metrics) -> Metrics:
    """Returns `metrics` on rank 0 and none on other ranks, so that values equal on all ranks count once."""
    return metrics if dist.get_rank() == 0 else {}


def reshard(module: nn.Module) -> None:
    """Frees all gathered weights, so that `module.parameters()` are the shards that are trained and saved.

    Some are still gathered after a pass without gradient. A write to them would be lost at the next reshard.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def whole_tensor(tensor: Any) -> Tensor:
    """Gathers a sharded tensor (collective), or returns an unsharded tensor unchanged."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class GatheredWeights(Mapping[str, Tensor]):
    """A module's weights by name, each gathered when it is read and freed when the reader drops it.

    Only one whole weight exists at a time, so no second copy of the model is needed. Collective: all ranks must read
    the same names in the same order, as iteration does. Readers must copy what they keep: it may be the trained weight.
    """

    prefix: ClassVar[str] = "model."
    """What precedes a weight's own name in the names of `ScoringModel`."""

    def __init__(self, module: nn.Module) -> None:
        reshard(module)
        self._shards = {name.removeprefix(self.prefix): tensor for name, tensor in module.state_dict().items()}
        self._names = {name: name for name in self._shards}

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        return self._gather(name)

    def _gather(self, name: str) -> Tensor:
        return whole_tensor(self._shards[name].detach().to(this_device()))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@torch.no_grad()
def trained_weights(module: nn.Module) -> dict[str, Tensor]:
    """Returns CPU copies of the whole trained weights of a `ScoringModel` on every rank; collective.

    They are copied as one block, because each copy from a device waits for it, and an adapter has hundreds of tensors.
    """
    reshard(module)
    found = {
        name.removeprefix(GatheredWeights.prefix): whole_tensor(parameter.detach().to(this_device()))
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    block = torch.cat([tensor.flatten() for tensor in found.values()]).cpu()
    parts = block.split([tensor.numel() for tensor in found.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(found.items(), parts, strict=True)}


class MergedWeights(GatheredWeights):
    """The weights of a module with an adapter under the base model's names, each merged when it is read.

    LoRA (arXiv 2106.09685): `V = W + s B A` with the scale `s = alpha / rank`. DoRA (arXiv 2402.09353): `m V / |V|`,
    each row of V scaled to its trained magnitude m, with the norm over the row's inputs. Sums are computed in float32
    and rounded once to W's type. For a 4-bit base, W is the dequantised weight in the compute type.
    """

    prefix = "model.base_model.model."

    def __init__(self, module: nn.Module, *, scale: float) -> None:
        super().__init__(module)
        self._packed = {
            name.removeprefix(self.prefix): weight for name, weight in pretrained.quantised_weights(module).items()
        }
        self._scale = scale
        plain = [name for name in self._shards if ".lora_" not in name]  # not A, B and DoRA's magnitude
        self._names = {name.replace(".base_layer.", "."): name for name in plain}

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        source = self._names[name]
        layer = source.removesuffix(".base_layer.weight")
        weight = pretrained.dequantised(self._packed[source]) if source in self._packed else self._gather(source)
        if layer == source:
            return weight
        down, up = (self._gather(f"{layer}.{part}.default.weight").float() for part in ("lora_A", "lora_B"))
        total = weight.float().addmm(up, down, alpha=self._scale)
        magnitude = f"{layer}.lora_magnitude_vector.default.weight"
        if magnitude in self._shards:
            total *= (self._gather(magnitude).float() / torch.linalg.norm(total, dim=1))[:, None]
        return total.to(weight.dtype)
