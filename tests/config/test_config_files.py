"""The YAML files that are shipped."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from cepo.cli import main
from cepo.config import load_config
from cepo.config.loader import plain_tree
from cepo.trees import leaves

CONFIGS = Path(__file__).parents[2] / "configs"
EVERY_YAML = sorted([*CONFIGS.rglob("*.yaml"), *(CONFIGS.parent / "examples").rglob("*.yaml")])
COMPARED = ("grpo", "rlsd", "cepo", "opsd", "sdpo")
METHODS = {"geo3k": COMPARED, "microgeo": (*COMPARED, "hindsight", "rlcsd", "visual")}
EVERY_METHOD = [(world, method) for world, methods in METHODS.items() for method in methods]


@cache
def resolved(world: str, name: str) -> dict[str, Any]:
    """All settings of a file by their dotted keys. Read only."""
    return dict(leaves(plain_tree(load_config([f"config=configs/{world}/{name}.yaml"]))))


@pytest.mark.parametrize(("world", "method"), EVERY_METHOD)
def test_a_method_file_differs_only_under_algorithm(world: str, method: str) -> None:
    run, base = resolved(world, method), resolved(world, "base")
    different = {key for key in run.keys() | base.keys() if run.get(key) != base.get(key)}
    outside = {key for key in different if not key.startswith("algorithm.")}
    named_after_method = set() if method == "grpo" else {"trainer.experiment_name"}
    learning_rate = {"worker.actor.optim.lr"} if (world, method) == ("geo3k", "cepo") else set()
    assert outside == named_after_method | learning_rate
    written = leaves(yaml.safe_load((CONFIGS / world / f"{method}.yaml").read_text()))
    assert {key for key, _ in written} == {"base", "algorithm.adv_estimator"} | learning_rate


def test_microgeo_trains_all_weights_in_float32() -> None:
    run = load_config(["config=configs/microgeo/cepo.yaml"])
    actor = run.worker.actor
    assert (actor.model.lora.rank, actor.optim.lr, actor.optim.betas) == (0, 1e-4, [0.9, 0.99])
    assert (actor.fsdp.mp_param_dtype, run.worker.rollout.dtype, actor.fsdp.torch_dtype) == ("fp32", "fp32", None)
    assert load_config(["config=configs/microgeo/lora.yaml"]).worker.actor.model.lora.rank == 16


def schema_faults(tree: Any) -> list[str]:
    """What an editor would mark in a file."""
    jsonschema = pytest.importorskip(
        "jsonschema", reason="an editor's check needs jsonschema, which Ray and vLLM bring"
    )
    schema = json.loads((CONFIGS / "schema.json").read_text(encoding="utf-8"))
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(tree)]


def test_the_committed_schema_is_what_cepo_config_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--schema"]) == 0
    assert capsys.readouterr().out == (CONFIGS / "schema.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", EVERY_YAML, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_the_first_line_of_every_yaml_names_a_schema_it_keeps(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    mark, _, path = text.splitlines()[0].partition("=")
    assert mark == "# yaml-language-server: $schema"
    assert (file.parent / path).resolve() == CONFIGS / "schema.json"
    assert schema_faults(yaml.safe_load(text)) == []


@pytest.mark.parametrize(
    ("tree", "marked"),
    [
        ({"data": {"max_promt_length": 3}}, True),
        ({"worker": {"rollout": {"n": 0}}}, True),
        ({"worker": {"rollout": {"n": "${data.seed}"}}}, False),
        ({"worker": {"rollout": {"top_k": -1, "val_override_config": {"temperature": 0}}}}, False),
        ({"worker": {"rollout": {"val_override_config": {"temprature": 0}}}}, True),
        ({"algorithm": {"adv_estimator": "cepo", "weight": {"clip_radius": 1.0}}}, True),
        ({"algorithm": {"negative": {"select": "random"}, "rlcsd": {"num_wrong": 2}}}, False),
        ({"algorithm": {"my_method": {"anything": 1}}}, False),
        ({"algorithm": {"gama": 1.0}}, True),
        ({"base": "base.yaml", "trainer": {"max_steps": None}}, False),
    ],
)
def test_the_schema_marks_what_the_reader_refuses(tree: Any, marked: bool) -> None:
    assert bool(schema_faults(tree)) == marked
