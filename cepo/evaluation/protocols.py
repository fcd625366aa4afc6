"""Knows the protocols of `cepo evaluate protocol=NAME`: what a benchmark is asked, and how responses are sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cepo.errors import ConfigError
from cepo.files.secrets import without_secrets
from cepo.files.trees import Fields

LMMS_LIMIT = 49152
"""The limit of new tokens of lmms-eval's reasoning tasks."""
SAMPLING = ("n", "temperature", "top_p", "top_k", "presence_penalty")
"""The options that are short for `worker.rollout.val_override_config.*`."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The options and settings that a protocol stands for; those of the command line override them."""

    options: Mapping[str, str]
    settings: Sequence[str]
    is_lmms: bool = False  # benchmarks are asked with lmms-eval's prompts, and the first <answer> counts


PROTOCOLS = {
    # The paper's section on experiments.
    "paper": Protocol(
        options={"n": "1", "temperature": "1", "top_p": "1", "top_k": "40", "presence_penalty": "2"},
        settings=["data.max_response_length=32000"],
    ),
    # lmms-eval at 75571cf: temperature 0 where a task sets none (lmms_eval/models/chat/vllm.py), its reasoning tasks' limit.
    "lmms": Protocol(
        options={"n": "1", "temperature": "0", "top_p": "1", "top_k": "-1", "presence_penalty": "0"},
        settings=[f"data.max_response_length={LMMS_LIMIT}", "data.format_prompt=null"],
        is_lmms=True,
    ),
}


def with_protocol(options: Mapping[str, str], settings: Sequence[str]) -> list[str]:
    """Returns the settings of a command line, with those that its options are short for.

    Raises `ConfigError` for an unknown protocol.
    """
    name = options.get("protocol")
    if name is not None and name not in PROTOCOLS:
        raise ConfigError(f"protocol={name}: unknown protocol; accepted: {', '.join(PROTOCOLS)}")
    protocol = Protocol(options={}, settings=[]) if name is None else PROTOCOLS[name]
    sampling = {**protocol.options, **options}
    sampling_settings: list[str] = []
    for key in SAMPLING:
        if key in sampling:
            sampling_settings.append(f"worker.rollout.val_override_config.{key}={sampling[key]}")
    return [*protocol.settings, *settings, *sampling_settings]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How benchmarks are asked and graded, beyond the configuration; a user's own data is not affected.

    Problems that only a judge can grade are left out without a `judge`.
    """

    is_lmms: bool = False  # prompts of lmms-eval, and its first <answer>
    judge: Fields | None = None  # arguments of `cepo.rewards.judge.compute_score`


def rules_of(options: Mapping[str, str]) -> Rules:
    """Returns the rules that a command line's options state; raises `ConfigError` for a judge without address or model."""
    address = options.get("judge")
    model = options.get("judge_model")
    if (address is None) != (model is None):
        raise ConfigError(
            "a judge needs both judge=ADDRESS, of an OpenAI-compatible server up to /v1, and judge_model=MODEL"
        )
    if address is not None and not address.startswith(("http://", "https://")):
        raise ConfigError(f"judge={without_secrets(address)}: give an address that begins with http:// or https://")
    return Rules(
        is_lmms=options.get("protocol") == "lmms",
        judge=None if address is None else {"base_url": address, "model": model},
    )
