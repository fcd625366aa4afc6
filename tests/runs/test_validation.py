from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from factories import rollouts_of
from generator_cases import picture, reference_model
from training_runs import BuildActor, Train, json_lines, noting, random_response, recorded_groups, reference_log_probs

from cepo.algorithms.settings import TeacherConfig
from cepo.data.batch import ScoringRow
from cepo.data.contexts import ContextBuilder
from cepo.data.dataset import Problem
from cepo.metrics import results
from cepo.models.processing import Processing
from cepo.trainer.recording import leak_metrics

pytestmark = pytest.mark.heavy

OVERRIDE = "worker.rollout.val_override_config"


@pytest.fixture
def validated(train: Train, problem_file: Path) -> Train:
    """2 training steps, and validation on 5 held-out problems."""
    return partial(
        train,
        f"data.val_files={problem_file}@train[3:]",
        "trainer.val_before_train=true",
        "trainer.val_freq=1",
        "trainer.val_generations_to_log=2",
        "trainer.leak_probe_size=0",
    )


def test_validation_asks_2_greedy_samples_of_3_of_5_problems(validated: Train) -> None:
    """It runs before training and at each step, of the same problems. 2 are recorded, also after a resume."""
    asked: list[tuple[int, ...]] = []

    def note(requests: Any, *_: Any) -> None:
        if len(requests) != 4:  # those of a training step
            asked.append(tuple(request.seed for request in requests))

    greedy = [f"{OVERRIDE}.n=2", f"{OVERRIDE}.temperature=0", "trainer.val_max_samples=3"]
    validated(*greedy, "trainer.max_steps=1", prepare=noting("backend.generate", note))
    resumed = validated(*greedy, prepare=noting("backend.generate", note))
    assert resumed.first_step == 1
    assert [len(seeds) for seeds in asked] == [3] * 3
    assert len(set(asked)) == 1
    found = [row for row in resumed.metrics if "val/reward" in row]
    assert [row["step"] for row in found] == [0, 1, 2]
    assert {row["val/num_samples"] for row in found} == {6}
    assert all(0.1 < row["perf/cpu_memory_used_gb"] < 100 for row in resumed.steps)
    recorded = json_lines(resumed.folder / "generations.jsonl")
    responses: dict[tuple[int, str], list[str]] = {}
    for row in recorded:
        responses.setdefault((row["step"], row["prompt_id"]), []).append(row["response"])
    problems = {prompt for _, prompt in responses}
    assert len(problems) == 2
    assert responses.keys() == {(step, prompt) for step in (0, 1, 2) for prompt in problems}  # none lost at the resume
    assert all(len(pair) == 2 and pair[0] == pair[1] for pair in responses.values()), "greedy samples are equal"
    assert {row["step"] for row in recorded_groups(resumed.folder)} == {1, 2}


def test_batches_and_greedy_accuracy_leave_the_sampled_one(validated: Train) -> None:
    """Batches of 2 find what one batch does; greedy accuracy is what one at temperature 0 finds, one response each.

    Validation alone trains nothing and saves nothing.
    """
    only = ["trainer.val_only=true", "trainer.val_before_train=false", "trainer.val_generations_to_log=5"]
    sampled = [*only, f"{OVERRIDE}.n=3", "trainer.save_freq=1"]
    plain = validated(*sampled, name="plain")
    parts = validated(*sampled, "data.val_batch_size=2", name="parts")
    both = validated(*sampled, "trainer.val_greedy=true", name="both")
    [one], [other], [beside] = plain.metrics, parts.metrics, both.metrics
    kept = [name for name in one if name.startswith("val/")]
    assert (one["step"], one["val/num_samples"]) == (0, 15)
    assert not any(name.startswith(("actor/", "reward/")) for name in one)
    assert (list(plain.folder.glob("global_step_*")), plain.rollouts) == ([], [])
    assert {name: one[name] for name in kept} == pytest.approx({name: other[name] for name in kept}, abs=1e-6)
    assert json_lines(plain.folder / "generations.jsonl") == json_lines(parts.folder / "generations.jsonl")
    [greedy] = validated(*only, f"{OVERRIDE}.temperature=0", f"{OVERRIDE}.n=1", name="greedy").metrics
    assert (beside["val/greedy_accuracy"], beside["val/num_greedy_samples"]) == (greedy["val/accuracy"], 5)
    verdicts = {row["prompt_id"]: row["greedy_accuracy"] for row in json_lines(both.folder / "generations.jsonl")}
    assert sum(verdicts.values()) / len(verdicts) == beside["val/greedy_accuracy"]
    assert {name: beside[name] for name in kept} == {name: one[name] for name in kept}
    assert "val/greedy_accuracy" not in one


def test_leak_gaps_are_log_probs_with_less_without_the_answer(
    build_actor: BuildActor, tiny_model_folder: Path, tiny_processing: Processing
) -> None:
    problem = Problem(
        prompt_id="0", text="<image>Find x.", images=(picture(1),), ground_truth="4", solution=None, columns={}
    )
    contexts = ContextBuilder(tiny_processing, TeacherConfig(), max_context_length=512)
    plain = contexts.student(problem)
    responses = [random_response(length, length) for length in (5, 3, 9)]
    model = reference_model(tiny_model_folder)
    with_answer, without = (
        reference_log_probs(model, [ScoringRow(context=context, response_ids=ids) for ids in responses])
        for context in (contexts.teacher(problem, plain, "4"), plain)
    )
    gaps = [one - other for one, other in zip(with_answer, without, strict=True)]
    rollouts = rollouts_of(
        [*responses, (1, 2)],
        problems=[problem],
        prompts=[plain],
        responses=["it is 4", "as the given answer says", "the hint is 4", "not among the rows that are probed"],
        correct=torch.tensor([True, False, False, True]),
    )
    found = results(leak_metrics(rollouts, 3, contexts, cast("Any", build_actor())))
    assert found == pytest.approx(
        {
            "leak/mention_fraction": 2 / 3,
            "leak/hint_gap_right": float(gaps[0].mean()),
            "leak/hint_gap_wrong": float(torch.cat(gaps[1:]).mean()),
            "leak/log_likelihood_gap": sum(float(gap.sum()) for gap in gaps) / 3,
        },
        abs=1e-5,
    )
    assert min(abs(value) for value in found.values()) > 1e-3
