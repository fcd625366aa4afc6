"""Tests that each key of verl gets one line, which leads to a setting that exists or says that nothing takes its place."""

from __future__ import annotations

import pytest

from cepo.config import load_config
from cepo.errors import ConfigError


@pytest.mark.parametrize(
    ("argument", "advice"),
    [
        ("actor_rollout_ref.rollout.multi_turn.enable=true", "turns and tools are inside TRL and verl"),
        ("worker.rollout.multi_turn.enable=true", "turns and tools are inside TRL and verl"),
        ("actor_rollout_ref.rollout.agent.num_workers=8", "turns and tools are inside TRL and verl"),
        ("actor_rollout_ref.rollout.name=sglang", "write worker.rollout.name=vllm"),
        ("algorithm.adv_estimator=group_norm", "write algorithm.adv_estimator=grpo"),
        ("algorithm.adv_estimator=grpo_vectorized", "write algorithm.adv_estimator=grpo"),
    ],
)
def test_a_key_of_verl_has_one_line(argument: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["config=microgeo/base", argument])
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"argument '{argument}'")
    assert advice in line
