"""A teacher with weights of its own: scored as the policy is, frozen, checked by its tokens, and absent from checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from actors import differing
from test_methods import ROW_BY_ROW
from test_resume import FOUR_STEPS, assert_same_run, stopped_and_resumed
from training_runs import ONE_STEP, TWO_TEACHERS, BuildActor, Train, batch_of, reference_log_probs

from cepo.algorithms import build_estimator
from cepo.algorithms.settings import TeacherConfig
from cepo.config import load_config
from cepo.credit.resources import opened
from cepo.data.batch import Kept, ScoringRow
from cepo.errors import ConfigError
from cepo.files.trees import Fields
from cepo.integrations.adapter import supported_estimator
from cepo.models.processing import Processing
from cepo.types import Distillation, DivergenceConfig
from cepo.workers.checkpoint import save_state
from cepo.workers.memory import estimate_memory, read_shape
from cepo.workers.pass_sizes import needs_of
from cepo.workers.teacher_model import require_same_tokens

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def larger(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the tiny one's tokenizer and images, twice as wide."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder = shutil.copytree(tiny_model_folder, tmp_path_factory.mktemp("larger") / "model")
    config: Any = AutoConfig.from_pretrained(folder)
    config.text_config.hidden_size *= 2
    config.vision_config.out_hidden_size *= 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder


def policy_config(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder)


def test_the_policys_start_as_a_model_gives_the_same_bits(train: Train, tiny_model_folder: Path) -> None:
    """Of weights, records and metrics of one step; only what was computed twice is counted twice."""
    settings = [*TWO_TEACHERS, *ROW_BY_ROW, ONE_STEP]
    policy_teaches = train(*settings, name="own")
    frozen = train(*settings, f"algorithm.teacher.model_path={tiny_model_folder}", name="frozen")
    assert differing(policy_teaches.parameters, frozen.parameters) == []
    assert policy_teaches.rollouts == frozen.rollouts
    [metrics] = policy_teaches.metrics
    [metrics_of_frozen] = frozen.metrics
    assert metrics["work/teacher_rows"] == metrics_of_frozen["work/teacher_rows"] > 0
    differing_names = {
        name
        for name in metrics
        if not name.startswith(("timing_s/", "perf/", "work/")) and metrics[name] != metrics_of_frozen[name]
    }
    assert differing_names == set()


def test_another_model_teaches_and_stays_as_it_is(once: Train, larger: Path, rows: list[ScoringRow]) -> None:
    settings = [*TWO_TEACHERS, f"algorithm.teacher.model_path={larger}"]
    taught = once(*settings)
    assert differing(taught.parameters, once(*TWO_TEACHERS).parameters) != []
    teacher = taught.actor.teacher_model
    assert teacher is not None
    assert not any(weight.requires_grad for weight in teacher.module.parameters())
    from transformers import AutoModelForImageTextToText

    plain = AutoModelForImageTextToText.from_pretrained(larger).eval()
    scores = taught.actor.score_teacher(rows)
    for values, expected in zip(scores, reference_log_probs(plain, rows), strict=True):
        torch.testing.assert_close(values, expected, atol=1e-4, rtol=1e-4)


def test_a_teacher_that_was_not_announced_is_refused(build_actor: BuildActor, rows: list[ScoringRow]) -> None:
    """A measurement that did not name its methods' teacher once measured the policy's own weights in its place."""
    with pytest.raises(AssertionError, match="no teacher with weights other than the actor's was announced"):
        build_actor().score_teacher(rows)


def test_a_resumed_run_has_the_same_bits_and_teacher(once: Train, train: Train, larger: Path) -> None:
    option = f"algorithm.teacher.model_path={larger}"
    assert_same_run(once(*FOUR_STEPS, option), stopped_and_resumed(train, option, step=3))


def test_no_checkpoint_has_the_teachers_weights(build_actor: BuildActor, larger: Path, tmp_path: Path) -> None:
    taught = build_actor(teacher=TeacherConfig(model_path=str(larger)))
    sizes: list[int] = []
    for name, actor in (("plain", build_actor()), ("taught", taught)):
        save_state(actor, tmp_path / name)
        files = (tmp_path / name).rglob("*.*")
        sizes.append(sum(file.stat().st_size for file in files))
    assert sizes[0] == sizes[1] > 0


def test_an_update_distils_from_a_wider_model(build_actor: BuildActor, larger: Path, rows: list[ScoringRow]) -> None:
    """KL(P_T || P_S) over the vocabulary falls: the teacher's states come with its own head."""
    actor = build_actor(teacher=TeacherConfig(model_path=str(larger)), optim__lr=1e-2)
    named = [ScoringRow(**(vars(row) | {"view": "hinted", "row": number})) for number, row in enumerate(rows)]
    divergences: list[float] = []
    for step in range(4):
        actor.score_teacher(named, keep=Kept("hinted"))
        batch = batch_of(rows, [0.0] * len(rows), actor.score(rows))
        distillation = Distillation(
            divergence=DivergenceConfig(kind="forward_kl"), token_weight=batch.response_mask.float(), view="hinted"
        )
        metrics = actor.update(
            [batch.__class__(**(vars(batch) | {"rows": named, "distillation": distillation}))], step=step
        )
        divergences.append(float(metrics["distillation/divergence"].result or 0.0))
        actor.finish_step(step)
    assert divergences == sorted(divergences, reverse=True)
    assert divergences[-1] < 0.9 * divergences[0]


def test_other_tokens_are_refused(tiny_model_folder: Path, tiny_processing: Processing, tmp_path: Path) -> None:
    """The ids, whether a token is special, the rows of a distilled head, and the images decide."""
    folder = shutil.copytree(tiny_model_folder, tmp_path / "other")
    config = policy_config(tiny_model_folder)
    require_same_tokens(str(folder), tiny_processing.tokenizer, config, distils=True)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"has another tokenizer than the policy: 2 of \d+ ids differ, such as 0, which is"
    ):
        require_same_tokens(str(folder), tiny_processing.tokenizer, config, distils=False)
    shutil.copy(tiny_model_folder / "tokenizer.json", file)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings["vision_config"]["patch_size"] *= 2
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(ConfigError, match="reads images as"):
        require_same_tokens(str(folder), tiny_processing.tokenizer, config, distils=False)
    settings["vision_config"]["patch_size"] //= 2
    settings["text_config"]["vocab_size"] += 64
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    require_same_tokens(str(folder), tiny_processing.tokenizer, config, distils=False)
    with pytest.raises(ConfigError, match="distils whole distributions needs as many"):
        require_same_tokens(str(folder), tiny_processing.tokenizer, config, distils=True)


def test_a_teacher_has_one_source_of_weights() -> None:
    with pytest.raises(ConfigError, match="both name weights of the teacher; set source to actor"):
        load_config(
            ["config=configs/microgeo/cepo.yaml", "algorithm.teacher.model_path=a/b", "algorithm.teacher.source=ema"]
        )


def test_one_measurement_has_one_teacher(tiny_run: list[str]) -> None:
    methods = [build_estimator("cepo", {"teacher": {"model_path": path}}) for path in ("org/one", "org/two")]
    with (
        pytest.raises(ConfigError, match="one measurement loads one teacher, not org/one, org/two"),
        opened(load_config(tiny_run), None, methods),
    ):
        pass


def test_a_trainer_that_loads_no_teacher_refuses_one() -> None:
    settings: Fields = {"teacher": {"model_path": "org/one"}}
    with pytest.raises(ConfigError, match=r"method cepo needs teacher\.model_path, which verl lacks"):
        supported_estimator("cepo", settings, "verl")
    assert supported_estimator("cepo", settings, "TRL", loads_teachers=True).teacher.model_path == "org/one"


def test_the_estimate_has_the_frozen_teachers_weights(
    tiny_run: list[str], larger: Path, tiny_model_folder: Path
) -> None:
    """4 bytes for each weight in float32, none of the optimizer and none of a checkpoint."""
    settings = [*tiny_run, *TWO_TEACHERS, "worker.actor.fsdp.mp_param_dtype=fp32"]
    plain = estimate_memory(load_config(settings), with_vllm=False)
    taught = estimate_memory(load_config([*settings, f"algorithm.teacher.model_path={larger}"]), with_vllm=False)
    config = load_config(settings)
    model = config.worker.actor.model
    shape = read_shape(type(model)(model_path=str(larger)))
    assert taught.weights - plain.weights == 4 * shape.parameters
    assert taught.optimizer == plain.optimizer
    assert taught.checkpoint == plain.checkpoint
    assert taught.largest_pass >= plain.largest_pass


def test_the_estimate_counts_the_teachers_scoring_and_its_shards(tiny_run: list[str], larger: Path) -> None:
    """A wider teacher's scoring pass is larger than the policy's, and no more devices share it than there are."""
    rows = "worker.actor.micro_batch_size_per_device_for_experience=4096"
    shards = ("trainer.n_gpus_per_node=2", "worker.actor.fsdp.fsdp_size=8")
    settings = [*tiny_run, *TWO_TEACHERS, "worker.actor.fsdp.mp_param_dtype=fp32", rows, *shards]
    plain = estimate_memory(load_config(settings), with_vllm=False)
    config = load_config([*settings, f"algorithm.teacher.model_path={larger}"])
    taught = estimate_memory(config, with_vllm=False)
    shape = read_shape(type(config.worker.actor.model)(model_path=str(larger)))
    assert taught.weights - plain.weights == 4 * shape.parameters // 2
    assert taught.largest_pass > plain.largest_pass


def test_passes_are_chosen_for_the_larger_of_policy_and_teacher(tiny_run: list[str], larger: Path) -> None:
    """Both score as many rows at a time, so that the wider one decides how many fit."""
    settings = [*tiny_run, *TWO_TEACHERS, "worker.actor.model.freeze_vision_tower=true"]
    alone = load_config(settings)
    taught = load_config([*settings, f"algorithm.teacher.model_path={larger}"])
    scored_alone = needs_of(alone, alone.worker.actor, with_vllm=False).of_token.scored
    needs = needs_of(taught, taught.worker.actor, with_vllm=False)
    assert scored_alone < needs.of_token.scored < 2 * scored_alone
    assert needs.of_token.kept == needs_of(alone, alone.worker.actor, with_vllm=False).of_token.kept
