"""The card of a published model, whose run may be a stranger's."""

from __future__ import annotations

from pathlib import Path

from run_folders import write_run

from cepo.report.publishing import CARD_FILE, write_card

_CONFIG = """
algorithm:
  adv_estimator: cepo
data:
  train_files: hiyouga/geometry3k@train,a/b<img src=x>@train
worker:
  reward:
    reward_function: '![see](https://host.example/a.png) <b>|`x`|</b>'
"""


def test_no_text_of_a_run_becomes_markup_of_its_card(tmp_path: Path) -> None:
    """Markdown shows a character behind a backslash as it is; what is no name of the hub is no data set of the card."""
    run = write_run(tmp_path / "run", [(1, {"reward/mean": 0.5})], config=_CONFIG)
    write_card(run / "global_step_1" / "actor", tmp_path, base_model="a/b![x](y)", adapter=None)
    _, front, text = (tmp_path / CARD_FILE).read_text(encoding="utf-8").split("---\n", 2)
    assert "base_model" not in front
    assert "datasets:\n- hiyouga/geometry3k\nlibrary_name" in front
    assert r"\!\[see\](https://host.example/a.png) \<b\>\|\`x\`\|\</b\>" in text
    assert r"Weights of a/b\!\[x\](y), trained" in text
