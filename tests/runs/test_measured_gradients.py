"""`python3 -m lab.gradient`: the gradients are those of the loss, and what is known of their ratios comes out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import encoded, parameters_of, picture, random_response, reference_model

from cepo.data.batch import OptimizerBatch, ScoringRow
from cepo.losses.policy import LossDenominators
from cepo.models.processing import Processing
from cepo.workers.actor import Actor
from lab.gradient.__main__ import main

pytestmark = [pytest.mark.heavy, pytest.mark.nightly("a program of the lab")]

METHODS = "methods=grpo, rlsd(lambda_init=1)"


def without_floats(text: str) -> tuple[Any, list[float]]:
    """A JSON document with null for each number that is not whole, and these numbers in their order."""
    numbers: list[float] = []
    return json.loads(text, parse_float=lambda digits: numbers.append(float(digits))), numbers


@pytest.fixture(scope="module")
def gradient_command(tiny_run: list[str]) -> list[str]:
    return [*tiny_run, "data.rollout_batch_size=2", "batches=3", METHODS]


@pytest.fixture(scope="module")
def results(gradient_command: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("gradient") / "measured"
    assert main([*gradient_command, f"out={folder}"]) == 0
    assert not (folder / "gradients").exists(), "vectors are of no use once their products are known"
    return json.loads((folder / "gradient.json").read_text(encoding="utf-8"))


def test_gradients_are_those_of_plain_autograd(
    build_actor: Callable[..., Actor], tiny_model_folder: Path, tiny_processing: Processing
) -> None:
    """`-sum_t A_t log P_t / tokens` over two rows of 6 and 4 tokens; the weights stay as they are."""
    prompt = encoded(tiny_processing, "Find x.", picture(1))
    rows = [ScoringRow(context=prompt, response_ids=random_response(length, length)) for length in (6, 4)]
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    advantages = torch.randn(2, 6, generator=torch.Generator().manual_seed(0)) * mask
    batch = OptimizerBatch(
        rows=rows,
        old_log_probs=torch.zeros(2, 6),
        advantages=advantages,
        response_mask=mask,
        denominators=LossDenominators(num_tokens=10, num_sequences=2, max_response_length=8),
        on_policy=True,
    )
    actor = build_actor()
    before = parameters_of(actor)
    found = dict(zip(before, actor.gradients(batch), strict=True))
    assert all(torch.equal(value, before[name]) for name, value in parameters_of(actor).items())

    model = reference_model(tiny_model_folder)
    loss = torch.zeros(())
    for row, of_row in zip(rows, advantages, strict=True):
        ids = torch.tensor([[*prompt.token_ids, *row.response_ids]])
        assert prompt.images is not None
        output = model(
            input_ids=ids,
            mm_token_type_ids=(ids == tiny_processing.image_token_id).int(),
            pixel_values=prompt.images.pixel_values,
            image_grid_thw=prompt.images.grid_thw,
        )
        log_probs = output.logits[0, len(prompt.token_ids) - 1 : -1].log_softmax(dim=1)
        sampled = log_probs.gather(1, torch.tensor(row.response_ids)[:, None])[:, 0]
        loss = loss - (of_row[: len(sampled)] * sampled).sum() / 10
    loss.backward()
    expected = {f"model.{name}": parameter.grad for name, parameter in model.named_parameters()}
    assert found.keys() <= expected.keys()
    for name, gradient in found.items():
        other = expected[name]
        assert other is not None
        assert float((gradient - other).norm()) <= 1e-4 * float(other.norm()) + 1e-7, name


def test_a_group_mean_differs_from_leave_one_out_in_length_alone(results: dict[str, Any]) -> None:
    """`R - mean_g` of 4 rollouts is 3/4 of `R - mean of the others`: the same ratio and direction."""
    uniform, group, other = results["gradient"]
    assert (uniform["name"], group["name"]) == ("uniform", "grpo")
    assert group["ratio"]["value"] == pytest.approx(1.0, abs=1e-4)
    assert group["length"]["value"] == pytest.approx(0.75, abs=1e-4)
    assert abs(other["ratio"]["value"] - 1.0) > 1e-3, "a method that weighs its tokens is another estimator"
    assert results["counts"]["largest_length_error"] < 1e-5


def test_an_ended_measurement_of_gradients_goes_on(
    results: dict[str, Any], gradient_command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run keeps the batch that it timed; a finished measurement is not made again."""
    assert main([*gradient_command, f"out={tmp_path / 'new'}", "dry_run=true"]) == 0
    assert "3 batches of 3 gradients" in capsys.readouterr().out
    assert [file.name for file in (tmp_path / "new" / "gradients").iterdir()] == ["0.npy"]
    assert main([*gradient_command, f"out={tmp_path / 'new'}"]) == 0
    file = tmp_path / "new" / "gradient.json"
    again, numbers = without_floats(file.read_text(encoding="utf-8"))
    before, numbers_before = without_floats(json.dumps(results))
    assert again == before
    # Another run sums in single precision in another order: 6e-8 per addition, some hundred additions per number.
    assert numbers == pytest.approx(numbers_before, rel=1e-4, abs=1e-6)
    written = file.stat().st_mtime_ns
    assert main([*gradient_command, f"out={tmp_path / 'new'}"]) == 0
    assert file.stat().st_mtime_ns == written


def test_projected_gradients_say_how_far_they_are_off(
    results: dict[str, Any], gradient_command: list[str], tmp_path: Path
) -> None:
    """To 16,384 numbers: lengths are right to a few per cent, and so is the ratio to the same projection of the other."""
    assert main([*gradient_command, f"out={tmp_path / 'new'}", "projections=16384"]) == 0
    projected = json.loads((tmp_path / "new" / "gradient.json").read_text(encoding="utf-8"))
    assert 1e-5 < projected["counts"]["largest_length_error"] < 0.1
    assert projected["gradient"][1]["length"]["value"] == pytest.approx(0.75, abs=1e-4)
    assert "projected to 16,384 numbers" in (tmp_path / "new" / "gradient.md").read_text(encoding="utf-8")
    assert main([*gradient_command, f"out={tmp_path / 'new'}", "projections=8"]) == 2
