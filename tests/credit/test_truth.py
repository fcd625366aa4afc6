"""Which tokens are measured and which prefixes that takes; a damaged or another measurement's folder is one error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from cepo.config import load_config
from cepo.credit.truth import (
    CONTINUATIONS_FILE,
    SETTINGS_FILE,
    Continuations,
    chosen_tokens,
    claim_folder,
    needed_prefixes,
    prefix_of,
)
from cepo.data.dataset import Problem
from cepo.errors import ConfigError, DataError
from cepo.rollout.generator import Generation
from cepo.trainer.asking import Rollouts


def rollouts_of(rewards: list[float], responses: list[tuple[int, ...]]) -> Rollouts:
    """Two responses of each problem."""
    problems = [
        Problem(prompt_id=f"p{number}", text="", images=(), ground_truth="", solution=None, columns={})
        for number in range(len(responses) // 2)
    ]
    return Rollouts(
        step=0,
        problems=problems,
        prompts=[],
        generations=[Generation(response_ids=ids, log_probs=(-1.0,) * len(ids), finished=True) for ids in responses],
        responses=["" for _ in responses],
        scores=[{"overall": float(reward)} for reward in rewards],
        correct=torch.tensor(rewards) > 0,
    )


def test_only_groups_with_differing_rewards_are_measured() -> None:
    """Of three problems the second has equal rewards; rows 0, 1, 4 and 5 are left, of which the seed draws three."""
    rollouts = rollouts_of([1, 0, 1, 1, 0, 1], [(1, 2), (1, 3), (1, 2), (1, 2), (4, 5), (4, 6)])
    drawn = [tuple(chosen_tokens(rollouts, num_responses=3, num_tokens=9, seed=seed)) for seed in range(30)]
    assert {row for rows in drawn for row in rows} == {0, 1, 4, 5}
    assert {len(rows) for rows in drawn} == {3}
    assert len(set(drawn)) > 1
    with pytest.raises(DataError, match="all 3 groups of 2 responses have equal rewards"):
        chosen_tokens(rollouts_of([1] * 6, [(1,)] * 6), num_responses=3, num_tokens=9, seed=0)


def test_shared_beginnings_are_continued_once() -> None:
    """Responses 7 8 9 and 7 8 5 share three of their prefixes: nothing, 7, and 7 8. Whole responses have a verdict."""
    rollouts = rollouts_of([1, 0, 1, 0], [(7, 8, 9), (7, 8, 5), (7,), (6,)])
    chosen = chosen_tokens(rollouts, num_responses=9, num_tokens=9, seed=0)
    assert chosen == {0: [0, 1, 2], 1: [0, 1, 2], 2: [0], 3: [0]}
    prefixes = needed_prefixes(rollouts, chosen)
    assert [(prefix.prompt_id, prefix.tokens) for prefix in prefixes] == [
        ("p0", ()), ("p1", ()), ("p0", (7,)), ("p0", (7, 8)),
    ]  # fmt: skip
    assert prefix_of(rollouts, 0, 2).name == prefix_of(rollouts, 1, 2).name
    assert len({prefix.name for prefix in prefixes}) == 4


def test_of_long_responses_both_sides_of_some_tokens_count() -> None:
    rollouts = rollouts_of([1, 0], [tuple(range(50)), (99,)])
    chosen = chosen_tokens(rollouts, num_responses=9, num_tokens=5, seed=0)
    assert len(chosen[0]) == 5
    assert chosen[0] == sorted(chosen[0])
    needed = {length for token in chosen[0] for length in (token, token + 1) if length < 50}
    assert {len(prefix.tokens) for prefix in needed_prefixes(rollouts, {0: chosen[0]})} == needed
    assert chosen[0] != chosen_tokens(rollouts, num_responses=9, num_tokens=5, seed=1)[0]


WHOLE = {"prefix": "0/3", "length": 3, "right": "0110", "entropy": 0.5, "num_tokens": 40}


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"null", b"\xff\xfe"])
def test_settings_that_cannot_be_read_are_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / SETTINGS_FILE).write_bytes(text)
    config = load_config(["config=configs/microgeo/base.yaml"])
    with pytest.raises(DataError, match=rf"{tmp_path}/{SETTINGS_FILE} is damaged, .*give a new folder \(--out\)"):
        claim_folder(tmp_path, {}, config)


@pytest.mark.parametrize(
    "change", [{"prefix": None}, {"right": None}, {"right": "01x0"}, {"entropy": "much"}, {"num_tokens": [4]}]
)
def test_continuations_that_cannot_be_read_are_named(tmp_path: Path, change: dict[str, Any]) -> None:
    row = {key: value for key, value in (WHOLE | change).items() if value is not None}
    (tmp_path / CONTINUATIONS_FILE).write_text(f"{json.dumps(WHOLE)}\n{json.dumps(row)}\n")
    nothing = cast("Any", None)  # reading asks no engine
    with pytest.raises(DataError, match=f"{CONTINUATIONS_FILE} is damaged"):
        Continuations(tmp_path, nothing, nothing, number=4)
    (tmp_path / CONTINUATIONS_FILE).write_text(f"{json.dumps(WHOLE)}\n")
    assert Continuations(tmp_path, nothing, nothing, number=4).done["0/3"].right == "0110"


@pytest.mark.parametrize("change", ["algorithm.correct_key=overall", "algorithm.correct_threshold=0.9"])
def test_verdicts_by_another_rule_are_not_mixed(tmp_path: Path, change: str) -> None:
    command = ["config=configs/microgeo/base.yaml"]
    claim_folder(tmp_path / "m", {}, load_config(command))
    claim_folder(tmp_path / "m", {}, load_config(command))
    with pytest.raises(ConfigError, match=f"other settings: {change.partition('=')[0]};"):
        claim_folder(tmp_path / "m", {}, load_config([*command, change]))
