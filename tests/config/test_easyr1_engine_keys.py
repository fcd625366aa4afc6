"""Keys of EasyR1's engine: taken with one notice where they change nothing, refused where they would."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from config_arguments import REQUIRED, load, message_of, write


@pytest.mark.parametrize(
    ("argument", "part"),
    [
        ("worker.hybrid_engine=true", "share the device"),
        ("worker.actor.strategy=fsdp", "FSDP2"),
        ("worker.actor.fsdp.use_orig_params=false", "FSDP2"),
        ("worker.actor.ulysses_size=1", "Ulysses"),
        ("worker.rollout.disable_log_stats=true", "statistics"),
        ("worker.ref.fsdp.enable_cpu_offload=true", "this release builds no"),
        ("worker.critic.model.lora.rank=8", "trains all its weights"),
    ],
)
def test_a_key_of_easyr1s_engine_is_accepted_with_a_notice(
    argument: str, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="cepo.config"):
        assert load(argument) == load()
    notices = [record.getMessage() for record in caplog.records]
    assert len(notices) == 1
    assert notices[0].startswith("1 EasyR1 key without effect here:")
    assert f"{argument.partition('=')[0]} (argument '{argument}')" in notices[0]
    assert part in notices[0]


def test_engine_keys_share_one_notice_with_their_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file has 3 keys of EasyR1's engine."""
    text = "worker:\n  ref:\n    strategy: fsdp\n    offload: {offload_params: true}\n  actor:\n    strategy: fsdp\n"
    with caplog.at_level(logging.WARNING, logger="cepo.config"):
        load(write(tmp_path, "run.yaml", text))
    (notice,) = [record.getMessage() for record in caplog.records]
    assert notice.startswith("3 EasyR1 keys without effect here:")
    for key, line in (("ref.strategy", 3), ("ref.offload.offload_params", 4), ("actor.strategy", 6)):
        assert f"worker.{key} ({tmp_path / 'run.yaml'}, line {line})" in notice
    assert notice.count("no separate reference model") == 1


def test_a_faulty_config_gives_its_error_without_the_notices(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="cepo.config"):
        message_of([*REQUIRED, "worker.actor.strategy=fsdp", "data.seed=x"])
    assert not caplog.records
