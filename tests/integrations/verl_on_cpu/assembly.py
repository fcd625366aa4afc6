"""verl's trainer with cepo's methods, assembled in this process on a CPU, for the tests of `make verl`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"VERL_PLATFORM": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
os.environ |= {"VERL_USE_EXTERNAL_MODULES": "processor", "MASTER_PORT": "29617"}
os.environ |= {"RAY_DEDUP_LOGS": "0", "TOKENIZERS_PARALLELISM": "false"}

import processor
import ray
import torch
import transfer_queue as tq
from canned import FOLDER, told
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.workers.engine_workers import ActorRolloutRefWorker

from cepo.integrations.verl import CepoSyncTrainer

ROLLOUTS = Path(os.environ[FOLDER])


def configuration(*overrides: str) -> Any:
    """verl's whole configuration, as its command line makes it."""
    settings = [
        f"data.train_files={ROLLOUTS / 'verl.parquet'}",
        f"data.val_files={ROLLOUTS / 'verl.parquet'}",
        "data.train_batch_size=4",
        "data.max_prompt_length=1024",
        "data.max_response_length=256",
        "data.dataloader_num_workers=0",
        "data.shuffle=false",
        f"actor_rollout_ref.model.path={told()['model']}",
        "actor_rollout_ref.model.use_remove_padding=false",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.fsdp_config.strategy=fsdp2",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.calculate_log_probs=false",
        f"actor_rollout_ref.rollout.n={told()['group']}",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={ROLLOUTS / 'agent_loops.yaml'}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=canned",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.v1.trainer_mode=cepo_sync",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    ]
    with initialize_config_module(config_module="verl.trainer.config", version_base=None):
        config = compose(config_name="ppo_trainer", overrides=[*settings, *overrides])
    config.transfer_queue.enable = True
    OmegaConf.resolve(config)
    return config


class OneProcess:
    """verl's actor worker in this process, in place of a group of Ray workers."""

    def __init__(self, config: Any) -> None:
        self._dispatch_info = {"actor": [0]}
        self.worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
        self.worker.init_model()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)

    def weights(self) -> list[torch.Tensor]:
        return [parameter.full_tensor().detach().clone() for parameter in self.worker.actor.engine.module.parameters()]


class AgentLoops:
    """verl's agent loop worker in this process, in place of Ray workers."""

    def __init__(self, config: Any) -> None:
        self._worker = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class(config, None, None, None)

    def generate_sequences(self, batch: Any) -> None:
        async def finish() -> None:
            await self._worker.generate_sequences(batch)
            await asyncio.gather(*self._worker.background_tasks)

        asyncio.run(finish())


def assembled(config: Any) -> CepoSyncTrainer:
    """The trainer as `PPOTrainer.init` assembles it, without an inference engine, which needs a GPU."""
    trainer = CepoSyncTrainer(config)
    trainer._init_tokenizer()
    trainer._init_dataloader()
    trainer.actor_rollout_wg = OneProcess(trainer.config)
    trainer.ref_in_actor = False
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])  # rewards come with the responses
    trainer.checkpoint_manager = SimpleNamespace(sleep_replicas=lambda: None)
    trainer.curr_step_profile = False
    trainer.distillation_config = None
    trainer.agent_loop_manager = AgentLoops(trainer.config)
    return trainer


@contextmanager
def started(config: Any) -> Iterator[CepoSyncTrainer]:
    """Starts Ray, the queue and a process group of one; yields the assembled trainer."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    processor.register_engine()
    ray.init(num_cpus=8, object_store_memory=300 * 2**20, include_dashboard=False, log_to_driver=False)
    tq.init(config.transfer_queue)
    yield assembled(config)
    tq.close()
    ray.shutdown()
