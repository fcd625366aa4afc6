"""Maps the names that verl and TRL give to settings to ours, for error messages."""

from __future__ import annotations

NAMES = {
    "actor_rollout_ref.model.path": "worker.actor.model.model_path",
    "actor_rollout_ref.model": "worker.actor.model",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "worker.actor.global_batch_size",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl_coef",
    "actor_rollout_ref.actor": "worker.actor",
    "actor_rollout_ref.rollout": "worker.rollout",
    "data.train_batch_size": "data.rollout_batch_size",
    "trainer.total_training_steps": "trainer.max_steps",
    "trainer.test_freq": "trainer.val_freq",
    "trainer.default_local_dir": "trainer.save_checkpoint_path",
    "model_name_or_path": "worker.actor.model.model_path",
    "dataset_name": "data.train_files",
    "output_dir": "trainer.save_checkpoint_path",
    "report_to": "trainer.logger",
    "num_generations": "worker.rollout.n",
    "max_completion_length": "data.max_response_length",
    "num_train_epochs": "trainer.total_epochs",
    "learning_rate": "worker.actor.optim.lr",
    "beta": "algorithm.kl_coef",
    "epsilon": "worker.actor.clip_ratio_low",
}
"""A name, or the beginning of a dotted one, with our setting or section; longer ones stand first."""


def own_name(key: str) -> str | None:
    """Returns our name of a setting that verl or TRL names `key`; None if there is none."""
    for name, own in NAMES.items():
        if f"{key}.".startswith(f"{name}."):
            return own + key.removeprefix(name)
    return None
