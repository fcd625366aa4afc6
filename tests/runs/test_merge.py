"""`cepo merge` writes the trained model: the same logits, the same words, the same end tokens."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from training_runs import (
    FinishedRun,
    checked_config,
    encoded,
    picture,
    random_response,
    reference_logits,
    reference_model,
    run,
    whole,
)

from cepo.cli import main
from cepo.data.batch import ScoringRow
from cepo.errors import CheckpointError
from cepo.models.processing import Processing
from cepo.rollout.factory import build_generator
from cepo.rollout.generator import GenerationRequest, GeneratorSettings, SamplingSettings
from cepo.train import run_policy
from cepo.trainer.checkpoints import FILES_FILE, written_files
from cepo.workers.distributed import reshard
from cepo.workers.passes import RankPass

pytestmark = pytest.mark.heavy

LORA = ("worker.actor.model.lora.rank=4", "worker.actor.model.lora.alpha=8")
FULL = ("worker.actor.model.lora.rank=0",)
FROZEN_TOWER = (*FULL, "worker.actor.model.freeze_vision_tower=true")
Train = Callable[..., FinishedRun]


@pytest.fixture(scope="module")
def train(tiny_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Runs of 2 steps, in float32 and with a learning rate that takes them far from their base; each is run once."""
    runs: dict[tuple[str, ...], FinishedRun] = {}

    def train(*options: str) -> FinishedRun:
        if options not in runs:
            settings = ["worker.actor.fsdp.mp_param_dtype=fp32", "worker.actor.optim.lr=1e-2"]
            runs[options] = run(tiny_run, *settings, *options, folder=tmp_path_factory.mktemp("run"))
        return runs[options]

    return train


@pytest.fixture
def row(tiny_processing: Processing) -> ScoringRow:
    """12 response tokens behind a picture."""
    context = encoded(tiny_processing, "What is the angle?", picture(3))
    return ScoringRow(context=context, response_ids=random_response(12, seed=4))


def merge(*arguments: object) -> int:
    return main(["merge", *map(str, arguments)])


@torch.no_grad()
def trained_logits(finished: FinishedRun, row: ScoringRow) -> Tensor:
    """(response length, V) of the run's own worker, adapter apart and shards gathered as they were in training."""
    module = finished.actor.module.eval()
    _, (states,) = module(finished.actor.passes.collate(RankPass(indices=[0], rows=[row])))
    reshard(module)
    return states.float() @ whole(module.base.lm_head.weight).float().T


def assert_close(logits: Tensor, expected: Tensor) -> None:
    """To 1e-5 of the largest logit: two float32 passes differ by rounding of that scale, and by how much is the processor's."""
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def folder_logits(folder: Path, row: ScoringRow) -> Tensor:
    """(response length, V) of a plain transformers model."""
    model = reference_model(folder)
    return reference_logits(model, row, model.config.image_token_id).detach()


@pytest.mark.parametrize("options", [LORA, FROZEN_TOWER], ids=["lora", "frozen-tower"])
def test_a_merged_folder_has_the_trained_models_logits(
    train: Train, tiny_model_folder: Path, tmp_path: Path, row: ScoringRow, options: tuple[str, ...]
) -> None:
    """They agree to 1e-5, and differ by 0.1 from the base's."""
    finished = train(*options)
    assert merge("--checkpoint", finished.folder / "global_step_2", "--out", tmp_path / "merged") == 0
    logits = folder_logits(tmp_path / "merged", row)
    assert_close(logits, trained_logits(finished, row))
    assert (logits - folder_logits(tiny_model_folder, row)).abs().max() > 0.1


def test_an_adapter_alone_merges_into_its_or_a_given_base(
    train: Train, tiny_model_folder: Path, tmp_path: Path, row: ScoringRow
) -> None:
    """The folder has EasyR1's layout."""
    finished = train(*LORA)
    adapter = tmp_path / "global_step_9" / "actor" / "lora_adapter"
    shutil.copytree(finished.folder / "global_step_2" / "actor" / "lora_adapter", adapter)
    assert merge("--checkpoint", tmp_path / "global_step_9", "--out", tmp_path / "named") == 0
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tiny_model_folder)
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": "gone/away"}))
    assert merge("--checkpoint", adapter.parent, "--out", tmp_path / "given", "--base", tiny_model_folder) == 0
    for name in ("named", "given"):
        logits = folder_logits(tmp_path / name, row)
        assert_close(logits, trained_logits(finished, row))


def test_an_adapter_written_by_peft_merges_to_pefts_logits(
    tiny_model_folder: Path, tmp_path: Path, row: ScoringRow
) -> None:
    """The adapter is written as EasyR1 writes it, and the logits agree to 1e-5."""
    from peft import LoraConfig, TaskType, get_peft_model

    settings = LoraConfig(
        task_type=TaskType.CAUSAL_LM, r=4, lora_alpha=8, target_modules="all-linear", exclude_modules=".*visual.*"
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)  # PEFT draws A, and how large it comes decides how much merging rounds
        model = get_peft_model(reference_model(tiny_model_folder), settings)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)
    actor = tmp_path / "global_step_5" / "actor"
    model.save_pretrained(str(actor / "lora_adapter"))
    (actor / "huggingface").mkdir()
    for kind in ("model", "optim", "extra_state"):
        (actor / f"{kind}_world_size_2_rank_0.pt").touch()
    assert merge("--checkpoint", tmp_path / "global_step_5", "--out", tmp_path / "merged") == 0
    image_token = model.config.image_token_id
    expected = reference_logits(model.eval(), row, image_token).detach()
    logits = folder_logits(tmp_path / "merged", row)
    assert_close(logits, expected)
    assert (logits - folder_logits(tiny_model_folder, row)).abs().max() > 0.1


def test_an_impossible_upload_is_refused_before_the_merge(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = train(*LORA).folder / "global_step_2"
    arguments = ["--checkpoint", checkpoint, "--out", tmp_path / "merged"]
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no_token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    assert "hf auth login" in refusal(capsys, *arguments, "--upload", "someone/model")
    assert "give ORG/NAME" in refusal(capsys, *arguments, "--upload", "model")
    assert "give ORG/NAME" in refusal(capsys, *arguments, "--upload", "some one/model")
    assert "--upload" in refusal(capsys, *arguments, "--public")
    monkeypatch.setenv("HF_TOKEN", "hf_not_a_token")
    # Nothing listens there: the same failure as without a network, on every machine.
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", "http://127.0.0.1:9")
    unreachable = refusal(capsys, *arguments, "--upload", "someone/model")
    assert "the hub cannot be reached" in unreachable
    assert "hf auth whoami" in unreachable
    assert list(tmp_path.iterdir()) == []


def test_end_tokens_template_and_image_settings_are_kept(
    train: Train, tiny_model_folder: Path, tiny_processing: Processing, tmp_path: Path
) -> None:
    checkpoint = train(*FULL).folder / "global_step_2"
    assert merge("--checkpoint", checkpoint, "--out", tmp_path / "merged") == 0
    kept = (tmp_path / "merged" / "generation_config.json").read_bytes()
    assert kept == (tiny_model_folder / "generation_config.json").read_bytes()
    assert len(json.loads(kept)["eos_token_id"]) == 2
    merged = Processing(str(tmp_path / "merged"))
    assert merged.eos_token_ids == tiny_processing.eos_token_ids
    text, image = "Find x in <|im_end|>.", picture(5, (96, 64))
    one, other = encoded(merged, text, image), encoded(tiny_processing, text, image)
    assert one.token_ids == other.token_ids
    assert one.images is not None
    assert other.images is not None
    assert torch.equal(one.images.pixel_values, other.images.pixel_values)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged"]


def test_a_run_with_its_own_chat_template_hands_it_on(
    tiny_run: list[str], tiny_processing: Processing, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("Q: {{ messages[0]['content'] | map(attribute='text') | join('<|image_pad|>') }} A:")
    options = [f"data.override_chat_template={template}", "trainer.max_steps=1", *LORA]
    from datasets import Dataset

    Dataset.from_dict({"problem": [f"What is {n}?" for n in range(8)], "answer": ["1"] * 8}).to_parquet(
        str(tmp_path / "text.parquet")
    )
    run(tiny_run, *options, f"data.train_files={tmp_path / 'text.parquet'}", folder=tmp_path / "run")
    arguments = ["--checkpoint", tmp_path / "run" / "global_step_1", "--out", tmp_path / "merged"]
    assert merge(*arguments) == 2  # the record alone may not name a file of this machine
    assert merge(*arguments, "--chat-template", template) == 0
    merged = Processing(str(tmp_path / "merged"))
    assert merged.decode(merged.template_ids("2 + 2?")) == "Q: 2 + 2? A:"


def test_weights_alone_merge_and_are_refused_by_a_resume(tiny_run: list[str], tmp_path: Path) -> None:
    folder, out = tmp_path / "run", tmp_path / "merged"
    options = [*FULL, "worker.actor.fsdp.mp_param_dtype=fp32", "trainer.save_model_only=true"]
    finished = run(tiny_run, *options, folder=folder)
    checkpoint = folder / "global_step_2"
    actor = checkpoint / "actor"
    assert sorted(path.name for path in actor.iterdir()) == ["distributed"]
    weights = sum(tensor.nbytes for tensor in finished.parameters.values())
    assert weights < sum(path.stat().st_size for path in actor.rglob("*") if path.is_file()) < 1.2 * weights
    assert main(["merge", "--checkpoint", str(checkpoint), "--out", str(out), "--dtype", "fp32"]) == 0
    merged = load_file(out / "model.safetensors")
    trained = {name.removeprefix("model."): tensor for name, tensor in finished.parameters.items()}
    assert merged.keys() == trained.keys()
    assert all(torch.equal(merged[name], trained[name]) for name in trained)
    with pytest.raises(CheckpointError, match=r"global_step_2 holds only weights \(trainer.save_model_only\)"):
        run(tiny_run, *FULL, folder=folder)
    config = checked_config([*tiny_run, *options, f"trainer.save_checkpoint_path={folder}"])
    policy = run_policy(config)
    policy.begin()
    assert policy.checkpoint_to_load() is None, "a restart begins again"


def test_weights_have_the_bases_type_or_bfloat16(train: Train, tmp_path: Path) -> None:
    """They are bfloat16 where that is asked for."""
    checkpoint = train(*FULL).folder / "global_step_2"
    for name, options, dtype in [("own", (), "float32"), ("short", ("--dtype", "bf16"), "bfloat16")]:
        assert merge("--checkpoint", checkpoint, "--out", tmp_path / name, *options) == 0
        with safe_open(tmp_path / name / "model.safetensors", "pt") as tensors:
            assert {tensors.get_tensor(key).dtype for key in tensors.keys()} == {getattr(torch, dtype)}  # noqa: SIM118
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert [config["dtype"], config["text_config"]["dtype"], config["vision_config"]["dtype"]] == [dtype] * 3


def test_vllm_serves_a_merged_folder_with_the_trained_scores(
    train: Train, tmp_path: Path, tiny_processing: Processing
) -> None:
    """The log-probs agree to 1e-4."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    finished = train(*LORA)
    assert merge("--checkpoint", finished.folder / "global_step_2", "--out", tmp_path / "merged") == 0
    prompt = encoded(tiny_processing, "Find x.", picture(1))
    settings = GeneratorSettings(
        name="vllm",
        model_path=str(tmp_path / "merged"),
        dtype="fp32",
        max_model_len=512,
        max_num_batched_tokens=2048,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = build_generator(settings, tiny_processing, device=device)
    with contextlib.closing(generator):
        request = GenerationRequest(
            prompt_ids=prompt.engine_ids, num_prompt_tokens=len(prompt.token_ids), images=(picture(1),), seed=5
        )
        [group] = generator.generate([request], SamplingSettings(num_samples=2, max_response_length=16))
    rows = [ScoringRow(context=prompt, response_ids=tuple(one.response_ids)) for one in group]
    for one, expected in zip(group, finished.actor.score(rows), strict=True):
        torch.testing.assert_close(torch.as_tensor(one.log_probs), expected, rtol=0, atol=1e-4)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert merge(*arguments) == 2
    return capsys.readouterr().err


def test_what_cannot_be_merged_ends_with_one_message(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = train(*LORA)
    checkpoint, out = finished.folder / "global_step_2", tmp_path / "merged"
    (tmp_path / "empty").mkdir()
    assert "give a folder global_step_<N>" in refusal(capsys, "--checkpoint", tmp_path / "empty", "--out", out)
    assert "give a folder global_step_<N>" in refusal(capsys, "--checkpoint", tmp_path / "nowhere", "--out", out)
    assert "checkpoints: global_step_2" in refusal(capsys, "--checkpoint", finished.folder, "--out", out)
    gone = refusal(capsys, "--checkpoint", checkpoint, "--out", out, "--base", tmp_path / "gone")
    assert "name it with --base" in gone
    assert str(tmp_path / "gone") in gone
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    assert "is not empty" in refusal(capsys, "--checkpoint", checkpoint, "--out", tmp_path / "full")
    (tmp_path / "rank_files" / "actor").mkdir(parents=True)
    (tmp_path / "rank_files" / "actor" / "model_world_size_1_rank_0.pt").touch()
    assert "scripts/model_merger.py" in refusal(capsys, "--checkpoint", tmp_path / "rank_files", "--out", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full", "rank_files"]


def test_an_adapter_of_other_weights_is_refused(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has 1 weight too few, 1 too many or one of another shape; none is left out."""
    actor = tmp_path / "actor"
    shutil.copytree(train(*LORA).folder / "global_step_2" / "actor", actor)
    file = actor / "lora_adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = min(tensors)
    changes = {
        "lacks weights: 1 (": {key: tensor for key, tensor in tensors.items() if key != name},
        "the base model lacks: 1 (": tensors | {name.replace("layers.0", "layers.99"): tensors[name].clone()},
        "does not fit this base model": tensors | {name: tensors[name][:, :-1].contiguous()},
    }
    for words, changed in changes.items():
        save_file(changed, file)
        assert words in refusal(capsys, "--checkpoint", actor, "--out", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_critics_shards_are_not_taken_for_a_policys(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    critic = train(*FULL, "algorithm.adv_estimator=gae").folder / "global_step_2" / "critic"
    message = refusal(capsys, "--checkpoint", critic, "--out", tmp_path / "merged")
    assert "weights that the base model lacks: 2 (model.head.bias, model.head.weight)" in message


def hollow(source: Path, folder: Path) -> Path:
    """A copy of a run whose shards state one row more of each tensor than they have, sealed again; returns the checkpoint."""
    shutil.copytree(source, folder)
    checkpoint = folder / "global_step_2"
    file = checkpoint / "actor" / "distributed" / "rank_0_of_1.safetensors"
    with safe_open(file, "pt") as tensors:
        described = tensors.metadata()
    rows = {name: [first, total + 1] for name, (first, total) in json.loads(described["rows"]).items()}
    save_file(load_file(file), file, described | {"rows": json.dumps(rows)})
    (checkpoint / FILES_FILE).unlink()
    (checkpoint / FILES_FILE).write_text(json.dumps(written_files(checkpoint)))
    return checkpoint


def test_shards_without_data_are_refused_by_every_command(
    train: Train, tiny_run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A merge would write the untrained base and end with success."""
    checkpoint = hollow(train(*FULL).folder, tmp_path / "run")
    words = "does not have every row of '"
    assert words in refusal(capsys, "--checkpoint", checkpoint, "--out", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    assert main(["evaluate", f"checkpoint={checkpoint}", *reward_of(tiny_run), f"out={tmp_path / 'results'}"]) == 2
    assert words in capsys.readouterr().err
    settings = ["worker.actor.fsdp.mp_param_dtype=fp32", "worker.actor.optim.lr=1e-2", "trainer.max_steps=3"]
    with pytest.raises(CheckpointError, match=words):
        run(tiny_run, *settings, *FULL, f"trainer.load_checkpoint_path={checkpoint}", folder=tmp_path / "other")


def reward_of(settings: list[str]) -> list[str]:
    """The arguments of an evaluation that a run's record does not give."""
    (reward,) = (text for text in settings if text.startswith("worker.reward.reward_function="))
    (rows,) = (text.partition("=")[2] for text in settings if text.startswith("data.train_files="))
    return [reward, f"data={rows}", "n=1"]
