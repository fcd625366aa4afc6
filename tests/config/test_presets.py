"""The shipped YAML files: each keeps the schema, and resolves to the values of its table, written out here."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from case_files import cases

from cepo.algorithms import build_estimator
from cepo.config import RunConfig, check_config, load_config
from cepo.config.record import plain_tree
from cepo.data.prompts import HintTemplate
from cepo.files.trees import leaves

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))
EVERY_YAML = [*FILES, *sorted((REPOSITORY / "examples").rglob("*.yaml"))]
METHODS = ("grpo", "rlsd", "cepo", "opsd", "sdpo")
WORLDS = {"geo3k": METHODS, "microgeo": (*METHODS, "contrast_gate", "hindsight", "rlcsd", "visual", "input_contrast")}


def table(text: str) -> dict[str, Any]:
    """Settings by their dotted keys."""
    return dict(leaves(yaml.safe_load(text)))


GROUP = table("advantage: {ddof: 1, scale: std}")
SHOWN = table("""
    positive: {source: ground_truth, num_tokens: 512, success_threshold: null, exclude_self: false}
    teacher: {source: actor, model_path: null, sync_every: 1, ema_decay: 0.999, placement: user_suffix, template: null,
              with_images: true, max_reference_tokens: 64}
""")
EVIDENCE = {**GROUP, **SHOWN} | table("""
    advantage: {reward_low: 0.0, reward_high: 1.0, lam: 1.0, state_weight: none, baseline: group}
    weight: {lambda_init: 0.5, lambda_schedule: linear, lambda_decay_steps: 25, lambda_warmup_steps: 0, clip_radius: 0.5}
""")
DISTILLATION = {**GROUP, **SHOWN} | table("""
    distillation:
      weight: 1.0
      policy_weight: 0.0
      divergence: {kind: forward_kl, jsd_weight: 0.5, entropy_beta: 0.0, support: full, topk: 100, topk_from: student, clip: null,
                   clip_mode: token, importance_clip: null}
""")
NEGATIVE = table("""
    negative: {source: peer_answer, num_tokens: 512, select: lowest_reward, strict_lowest: false, fallback: student}
""")
PAPER: dict[str, dict[str, Any]] = {
    "grpo": GROUP,
    "rlsd": EVIDENCE,
    "cepo": EVIDENCE | NEGATIVE,
    "opsd": DISTILLATION,
    "sdpo": DISTILLATION | {"distillation.divergence.kind": "jsd", "teacher.source": "ema"},
}
"""The paper's comparison: all settings that each method reads."""

PAPERS_SETTING = table("""
    data: {train_files: hiyouga/geometry3k@train, rollout_batch_size: 32, max_response_length: 2048}
    algorithm: {disable_kl: true}
    trainer: {max_steps: 50}
    worker:
      rollout: {n: 8, temperature: 1.0, top_p: 1.0, top_k: -1}
      reward: {reward_function_kwargs: {}}
      actor:
        global_batch_size: 32
        ppo_epochs: 1
        clip_ratio_low: 0.2
        clip_ratio_high: 0.28
        clip_ratio_dual: 3.0
        loss_avg_mode: seq
        model: {model_path: Qwen/Qwen3-VL-2B-Instruct, lora: {rank: 16, alpha: 32, exclude_modules: .*visual.*}}
        optim: {strategy: adamw, lr_scheduler_type: cosine, lr_warmup_steps: 5}
""")
"""SPEC of the paper's run, the same for all five; cepo's learning rate alone differs."""

OWN_PAPER: dict[str, dict[str, Any]] = {
    "rlsd": table("{weight: {clip_radius: 0.2, lambda_decay_steps: 50}, teacher: {source: snapshot, sync_every: 10}}"),
    "opsd": table("""
        distillation: {divergence: {clip: 0.05, clip_mode: vocab_entry}}
        positive: {source: solution_or_answer, num_tokens: 2048}
        teacher: {source: reference}
    """),
    "sdpo": table("""
        distillation: {divergence: {support: topk, importance_clip: 2.0}}
        positive: {source: peer_full, exclude_self: true}
        teacher: {ema_decay: 0.95}
    """),
}
"""Differences of each method's own paper from the paper's comparison."""

WHOLE_RESPONSE = {"data.max_prompt_length": 3136}
ABLATIONS = yaml.safe_load("""
teacher_reference: {algorithm: {teacher: {source: reference}}}
teacher_snapshot_25: {algorithm: {teacher: {source: snapshot, sync_every: 25}}}
teacher_actor: {}
feedback_peer_prefix: {algorithm: {positive: &prefix {source: peer_prefix}, negative: *prefix}, data: {max_prompt_length: 1600}}
feedback_peer_suffix: {algorithm: {positive: &suffix {source: peer_suffix}, negative: *suffix}, data: {max_prompt_length: 1600}}
feedback_peer_full: {algorithm: {positive: &full {source: peer_full}, negative: *full}, data: {max_prompt_length: 3136}}
feedback_ground_truth_peer_full: {algorithm: {negative: {source: peer_full}}, data: {max_prompt_length: 3136}}
feedback_ground_truth_peer_answer: {}
lambda_constant_0.5: {algorithm: {weight: {lambda_schedule: constant}}}
lambda_constant_1.0: {algorithm: {weight: {lambda_schedule: constant, lambda_init: 1.0}}}
lambda_linear_1.0_over_10: {algorithm: {weight: {lambda_init: 1.0, lambda_decay_steps: 10}}}
lambda_linear_1.0_over_25: {algorithm: {weight: {lambda_init: 1.0}}}
lambda_linear_1.0_over_50: {algorithm: {weight: {lambda_init: 1.0, lambda_decay_steps: 50}}}
clip_radius_0.1: {algorithm: {weight: {clip_radius: 0.1}}}
clip_radius_0.2: {algorithm: {weight: {clip_radius: 0.2}}}
clip_radius_0.3: {algorithm: {weight: {clip_radius: 0.3}}}
clip_radius_0.4: {algorithm: {weight: {clip_radius: 0.4}}}
clip_radius_0.5: {}
clip_radius_0.6: {algorithm: {weight: {clip_radius: 0.6}}}
clip_radius_0.8: {algorithm: {weight: {clip_radius: 0.8}}}
group_size_16: {worker: {rollout: {n: 16}}}
""")
"""Differences of each ablation from cepo's own file; none for the row that is the main setting."""

RELEASED_CODE = table("""
    data: {max_prompt_length: 768, min_pixels: 262144, max_pixels: 4194304}
    algorithm:
      weight: {clip_radius: 0.2}
      negative: {strict_lowest: true}
      teacher: {placement: assistant_prefix, template: configs/teacher/released_code.jinja, with_images: false}
    worker:
      reward: {reward_function_kwargs: {format_weight: 0.1}}
      actor:
        global_batch_size: 16
        loss_avg_mode: token
        model: {lora: {alpha: 64}}
        optim: {lr_scheduler_type: constant, lr_warmup_steps: 0}
""")


@cache
def loaded(file: str | Path, *overrides: str) -> RunConfig:
    return load_config([f"config={CONFIGS / file}", *overrides])


@cache
def resolved(file: str, *overrides: str) -> dict[str, Any]:
    """All settings by their dotted keys. Read only."""
    return dict(leaves(plain_tree(loaded(file, *overrides))))


def section(method: str, file: str, *overrides: str) -> dict[str, Any]:
    """All settings that the method reads."""
    return dict(leaves(loaded(file, *overrides).methods[method]))


def difference(file: str, base: str) -> dict[str, Any]:
    """What `file` sets differently from `base`, the run's name left out."""
    file_settings = resolved(file)
    base_settings = resolved(base)
    keys = {key for key in file_settings if key not in base_settings or file_settings[key] != base_settings[key]} - {
        "trainer.experiment_name"
    }
    return {key: file_settings[key] for key in keys}


@pytest.mark.heavy
@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONFIGS).with_suffix("")))
def test_every_shipped_file_passes_the_checks(file: Path) -> None:
    prompts = 16 if file.parent.name == "real_model" else 32
    responses = 16 if file.stem == "group_size_16" else 8
    samples = f"samples per step: {prompts} prompts x {responses} responses = {prompts * responses}"
    assert samples in check_config(loaded(file))


@pytest.mark.heavy
def test_no_two_of_the_shipped_runs_share_a_folder() -> None:
    runs = [file for file in FILES if file.stem != "base"]
    names = [loaded(file).trainer.experiment_name for file in runs]
    assert len(set(names)) == len(runs) > 60


@pytest.mark.parametrize("method", METHODS)
def test_a_methods_file_or_its_name_alone_gives_the_papers_table(method: str) -> None:
    for world in ("microgeo", "geo3k"):
        assert section(method, f"{world}/{method}.yaml") == PAPER[method]
    assert section(method, "geo3k/base.yaml", f"algorithm.adv_estimator={method}") == PAPER[method]
    run = resolved(f"geo3k/{method}.yaml")
    assert {key: run[key] for key in PAPERS_SETTING} == PAPERS_SETTING
    assert run["worker.actor.optim.lr"] == (5e-6 if method == "cepo" else 1e-6)


@pytest.mark.parametrize("method", OWN_PAPER)
def test_an_own_paper_file_resolves_to_its_methods_own_table(method: str) -> None:
    expected = {f"algorithm.{key}": value for key, value in OWN_PAPER[method].items()}
    room = {} if method == "rlsd" else WHOLE_RESPONSE
    assert difference(f"geo3k/own_paper/{method}.yaml", f"geo3k/{method}.yaml") == expected | room


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rate", ["1e-6", "5e-6"])
def test_equal_lr_files_change_the_learning_rate_alone(rate: str, method: str) -> None:
    file = f"geo3k/equal_lr/{rate}/{method}.yaml"
    assert resolved(file)["worker.actor.optim.lr"] == float(rate)
    assert set(difference(file, f"geo3k/{method}.yaml")) <= {"worker.actor.optim.lr"}


@pytest.mark.heavy
def test_each_of_21_ablations_changes_what_its_row_says_alone() -> None:
    files = (CONFIGS / "geo3k" / "ablations").glob("*.yaml")
    differences = {file.stem: difference(str(file.relative_to(CONFIGS)), "geo3k/cepo.yaml") for file in files}
    assert differences == {name: dict(leaves(changes)) if changes else {} for name, changes in ABLATIONS.items()}


def test_the_snapshot_ablation_is_refreshed_when_lambda_is_0() -> None:
    """The paper's own settings: the update of the 1-based step 25 is the first after which the snapshot differs."""
    method: Any = build_estimator("cepo", loaded("geo3k/ablations/teacher_snapshot_25.yaml").methods["cepo"])
    assert method.config.teacher.sync_every == 25
    assert [method.mixing(step) for step in (24, 25)] == [pytest.approx(0.02), 0.0]


def test_contexts_of_peer_ablations_hold_question_and_reference() -> None:
    question = resolved("geo3k/base.yaml")["data.max_prompt_length"]
    for name, reference in (("peer_prefix", 512), ("peer_suffix", 512), ("peer_full", 2048)):
        run = resolved(f"geo3k/ablations/feedback_{name}.yaml")
        assert run["data.max_prompt_length"] >= question + reference + 64
        longest = run["data.max_prompt_length"] + run["data.max_response_length"]
        assert run["worker.rollout.max_num_batched_tokens"] >= longest


def test_the_released_code_is_what_the_authors_repository_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    changed = difference("geo3k/released_code.yaml", "geo3k/cepo.yaml")
    assert changed == RELEASED_CODE
    plan = check_config(load_config(["config=configs/geo3k/released_code.yaml"]))
    assert any(line.startswith("optimizer updates per step: 2, each over 128 samples") for line in plan)
    assert "trained weights: LoRA, rank 16, scale 4" in plan
    assert resolved("geo3k/released_code.yaml")["data.max_response_length"] == 2048


def test_the_released_codes_reference_precedes_the_response() -> None:
    template = HintTemplate("assistant_prefix", str(CONFIGS / "teacher" / "released_code.jinja"))
    assert template.render(prompt="Find x.", reference="70") == " 70"


def test_the_readme_names_every_file_or_its_folder() -> None:
    text = (CONFIGS / "README.md").read_text(encoding="utf-8")
    grouped = {"ablations", "1e-6", "5e-6", "accuracy_curve", "first_commit", "mmfine", "real_model"}
    assert FILES
    for file in FILES:
        name = file.parent.name if file.parent.name in grouped else f"{file.parent.name}/{file.name}"
        assert name in text, name


@pytest.mark.parametrize(("world", "method"), [(world, name) for world, names in WORLDS.items() for name in names])
def test_a_method_file_names_its_method_alone(world: str, method: str) -> None:
    learning_rate = {"worker.actor.optim.lr"} if (world, method) == ("geo3k", "cepo") else set()
    written = leaves(yaml.safe_load((CONFIGS / world / f"{method}.yaml").read_text()))
    assert {key for key, _ in written} == {"base", "algorithm.adv_estimator"} | learning_rate


def test_microgeo_trains_all_weights_in_float32() -> None:
    run = loaded("microgeo/cepo.yaml")
    actor = run.worker.actor
    assert (actor.model.lora.rank, actor.optim.lr, actor.optim.betas) == (0, 1e-4, [0.9, 0.99])
    assert (actor.fsdp.mp_param_dtype, run.worker.rollout.dtype, actor.fsdp.torch_dtype) == ("fp32", "fp32", None)
    assert loaded("microgeo/lora.yaml").worker.actor.model.lora.rank == 16


def schema_faults(tree: Any) -> list[str]:
    """What an editor would mark in a file."""
    jsonschema = pytest.importorskip(
        "jsonschema", reason="an editor's check needs jsonschema, which Ray and vLLM bring"
    )
    schema = json.loads((CONFIGS / "schema.json").read_text(encoding="utf-8"))
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(tree)]


@pytest.mark.parametrize("file", EVERY_YAML, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_the_first_line_of_every_yaml_names_a_schema_it_keeps(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    mark, _, path = text.splitlines()[0].partition("=")
    assert mark == "# yaml-language-server: $schema"
    assert (file.parent / path).resolve() == CONFIGS / "schema.json"
    assert schema_faults(yaml.safe_load(text)) == []


@pytest.mark.parametrize(
    ("tree", "marked"),
    cases(__file__, "schema_cases.yaml"),
)
def test_the_schema_marks_what_the_reader_refuses(tree: Any, marked: bool) -> None:
    assert bool(schema_faults(tree)) == marked
