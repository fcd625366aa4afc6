"""`worker.critic`: what it takes over from the actor, and what is checked where a method needs it."""

from __future__ import annotations

from typing import Any

import pytest

from cepo.config import RunConfig, check_config, load_config
from cepo.errors import ConfigError

BASE = ["config=configs/microgeo/base.yaml"]
WITH_CRITIC = [*BASE, "algorithm.adv_estimator=gae"]


def load(*arguments: Any) -> RunConfig:
    return load_config([*WITH_CRITIC, *arguments])


def test_nulls_of_the_critic_are_the_actors_settings() -> None:
    """They are path and batch size; that other defaults are EasyR1's is held by tests/config/test_easyr1_keys.py."""
    alone = ["data.train_files=microgeo:train", "worker.actor.model.model_path=microgeo:model"]
    critic = load_config(alone).worker.critic
    assert (critic.model.model_path, critic.global_batch_size) == (None, None)
    assert critic.cliprange_value == 0.5
    resolved = load("worker.actor.global_batch_size=16").worker.resolved_critic
    assert (resolved.model.model_path, resolved.global_batch_size) == ("microgeo:model", 16)


def test_the_critic_inherits_the_actors_overrides_and_trust() -> None:
    """They come with the actor's path, and the critic's own entries take precedence."""
    arguments = [
        "worker.actor.model.trust_remote_code=true",
        "worker.actor.model.override_config={initializer_range: 1, image_token_id: 2}",
        "worker.critic.model.override_config={image_token_id: 3}",
    ]
    model = load(*arguments).worker.resolved_critic.model
    assert (model.trust_remote_code, model.override_config) == (True, {"initializer_range": 1, "image_token_id": 3})
    own = load(*arguments, "worker.critic.model.model_path=org/critic").worker.resolved_critic.model
    assert (own.model_path, own.trust_remote_code, own.override_config) == ("org/critic", False, {"image_token_id": 3})


def test_the_plan_names_the_critic_where_one_is_needed() -> None:
    line = "critic: all weights of microgeo:model, 4 optimizer updates per step, learning rate 1e-05"
    settings = ["worker.critic.global_batch_size=16", "worker.critic.ppo_epochs=2", "worker.critic.optim.lr=1e-5"]
    assert line in check_config(load(*settings))
    assert not any("critic" in part for part in check_config(load_config([*BASE, *settings])))


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("worker.critic.global_batch_size=20", r"optimizer steps of worker\.critic\.global_batch_size=20 prompts"),
        ("worker.critic.model.model_path=no/such/folder", r"worker\.critic\.model\.model_path=no/such/folder"),
        ("worker.critic.model.model_path=microgeo:train", r"worker\.critic\.model\.model_path=microgeo:train"),
    ],
)
def test_a_fault_in_the_critics_section_matters_where_needed(argument: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_config(load(argument))
    check_config(load_config([*BASE, argument]))
