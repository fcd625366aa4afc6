"""Evidence on the tokens that state the final answer and on the others, from texts and numbers worked out by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from config_arguments import REQUIRED

from cepo.config import load_config
from cepo.metrics import results
from cepo.models.processing import Processing
from cepo.rollout.generator import Generation
from cepo.trainer import recording
from cepo.trainer.asking import Asker, Rollouts
from cepo.trainer.planning import ScoringPlan
from cepo.trainer.recording import answer_metrics
from cepo.trainer.scoring import ScoredBatch
from cepo.types import TokenSignal


def asker(processing: Processing, *overrides: str) -> Asker:
    config = load_config([*REQUIRED, *overrides])
    return Asker(config.worker, config.algorithm, cast("Any", None), processing, cast("Any", None))


def scored(processing: Processing, pieces: list[list[str]], answers: list[str | None]) -> ScoredBatch:
    """One response of each list of texts, each of which is encoded by itself."""
    ids = [tuple(token for piece in each for token in processing.encode_text(piece)) for each in pieces]
    count = len(pieces)
    rollouts = Rollouts(
        step=0,
        problems=cast("Any", [None]),
        prompts=cast("Any", [None]),
        generations=[Generation(response_ids=each, log_probs=(0.0,) * len(each), finished=True) for each in ids],
        responses=["".join(each) for each in pieces],
        scores=[{"overall": 0.0}] * count,
        correct=torch.zeros(count, dtype=torch.bool),
    )
    everything = torch.ones(count, dtype=torch.bool)
    plan = ScoringPlan(
        rollouts=rollouts, live=everything, on_policy=everything, student={}, views=[], metrics={}, answers=answers
    )
    zeros = rollouts.sampled_log_probs
    return ScoredBatch(
        plan=plan, old_log_probs=zeros, teacher_log_probs={}, token_level_rewards=zeros, reference_log_probs=None, values=None,
        metrics={},
    )  # fmt: skip


def signal(batch: ScoredBatch, deltas: list[list[float]], advantages: list[float]) -> TokenSignal:
    mask = batch.rollouts.response_mask
    assert [len(each) for each in deltas] == mask.sum(dim=1).tolist(), "one delta for each token"
    return TokenSignal(
        advantages=torch.tensor(advantages).unsqueeze(1) * mask, diagnostics={"delta": batch.rollouts.padded(deltas)}
    )


def test_evidence_on_answers_and_on_the_rest_by_hand(tiny_processing: Processing) -> None:
    r"""Four tokens of answers, `1`, `7` and `4`, `0`; the fourth response has no advantage and the third no answer.

    answer: 3, -1 in row 0 and 0.5, 0.5 in row 1: mean 3 / 4, of the sizes 5 / 4.
    """
    rows = [[r"x=\boxed{", "1", "7", "}"], ["<answer>", "4", "0", "</answer>"], ["7"], [r"\boxed{", "9", "}"]]
    batch = scored(tiny_processing, rows, ["17", "40", None, "9"])
    counts = [[len(tiny_processing.encode_text(piece)) for piece in row] for row in rows]
    before, behind = counts[0][0], counts[1][3]
    deltas = [
        [2.0] * before + [3.0, -1.0] + [-4.0] * counts[0][3],
        [0.0] * counts[1][0] + [0.5, 0.5] + [1.0] * behind,
        [8.0] * sum(counts[2]),
        [8.0] * sum(counts[3]),
    ]
    found = results(answer_metrics(batch, signal(batch, deltas, [1.0, -0.5, 1.0, 0.0]), asker(tiny_processing)))
    others = before + counts[0][3] + counts[1][0] + behind
    assert found == pytest.approx(
        {
            "evidence/delta_mean_answer": 3 / 4,
            "evidence/delta_abs_answer": 5 / 4,
            "evidence/delta_mean_rest": (2 * before - 4 * counts[0][3] + behind) / others,
            "evidence/delta_abs_rest": (2 * before + 4 * counts[0][3] + behind) / others,
        }
    )


def test_a_method_without_evidence_has_no_such_metric(tiny_processing: Processing) -> None:
    batch = scored(tiny_processing, [[r"\boxed{7}"]], ["7"])
    plain = dataclasses.replace(signal(batch, [[1.0] * int(batch.rollouts.response_mask.sum())], [1.0]), diagnostics={})
    assert answer_metrics(batch, plain, asker(tiny_processing)) == {}
    unasked = dataclasses.replace(batch, plan=dataclasses.replace(batch.plan, answers=()))
    weighted = signal(batch, [[1.0] * int(batch.rollouts.response_mask.sum())], [1.0])
    assert results(answer_metrics(unasked, weighted, asker(tiny_processing))) == {}


def test_no_more_responses_are_searched_than_stated(
    tiny_processing: Processing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "RESPONSES_SEARCHED", 1)
    batch = scored(tiny_processing, [["<answer>", each, "</answer>"] for each in ("7", "8")], ["7", "8"])
    lengths = batch.rollouts.response_mask.sum(dim=1).tolist()
    deltas = [[float(row)] * length for row, length in enumerate(lengths)]
    found = results(answer_metrics(batch, signal(batch, deltas, [1.0, 1.0]), asker(tiny_processing)))
    assert found["evidence/delta_mean_answer"] == found["evidence/delta_abs_rest"] == 0.0


@pytest.mark.parametrize(
    ("pieces", "place"),
    [
        (["7 = ", r"\boxed{", "7", "}", " so 7"], 2),
        (["<answer>1</answer> ", "<answer>", "角", "</answer>"], 2),  # three tokens of one byte each
        ([r"\boxed{  ", "60", "  }"], 1),
    ],
)
def test_the_answer_has_the_tokens_of_its_place(tiny_processing: Processing, pieces: list[str], place: int) -> None:
    batch = scored(tiny_processing, [pieces], [pieces[place]])
    counts = [len(tiny_processing.encode_text(piece)) for piece in pieces]
    found = asker(tiny_processing).answer_tokens(batch.rollouts, 0, pieces[place])
    assert found == slice(sum(counts[:place]), sum(counts[: place + 1]))


def test_an_own_answer_function_has_the_last_place_of_its_text(tiny_processing: Processing, tmp_path: Path) -> None:
    file = tmp_path / "last_word.py"
    file.write_text("def last_word(response):\n    return response.split()[-1]\n")
    own = asker(tiny_processing, f"worker.reward.answer_function={file}:last_word")
    batch = scored(tiny_processing, [[r"\boxed{7} is ", "7"]], ["7"])
    length = int(batch.rollouts.response_mask.sum())
    assert own.answer_tokens(batch.rollouts, 0, "7") == slice(length - 1, length)
    assert own.answer_tokens(batch.rollouts, 0, "8") is None, "its text does not stand there"
