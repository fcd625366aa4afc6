from __future__ import annotations

import base64
import functools
import json
import shutil
import stat
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from actors import differing
from generator_cases import picture, random_adapter, reference_model
from json_files import write_lines
from local_server import local_server
from rounding import LOG_PROBS
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from training_runs import ONE_STEP, Train, checked_config, encoded, largest_gap, reference_log_probs

import cepo
from cepo.commands.cli import main
from cepo.data.batch import ScoringRow
from cepo.errors import CheckpointError
from cepo.models.processing import Processing
from cepo.run_folder.layout import FILES_FILE
from cepo.train import run_policy
from cepo.trainer.checkpoints import written_files
from cepo.workers.merged_model import adapter_base

pytestmark = pytest.mark.heavy

FAR = (
    "worker.actor.fsdp.mp_param_dtype=fp32",
    "worker.actor.optim.lr=1e-2",
    "trainer.save_freq=1",
    "trainer.save_limit=-1",
)
"""Takes two steps far from their base, and keeps the checkpoint of each."""
LORA = ("worker.actor.model.lora.rank=4", "worker.actor.model.lora.alpha=8")
FULL = ("worker.actor.model.lora.rank=0",)
FROZEN_TOWER = (*FULL, "worker.actor.model.freeze_vision_tower=true")


@pytest.fixture
def far(once: Train) -> Train:
    """Runs of 2 steps."""
    return functools.partial(once, *FAR)


def merge(*arguments: object) -> int:
    return main(["merge", *map(str, arguments)])


def folder_log_probs(folder: Path, rows: list[ScoringRow]) -> list[Tensor]:
    """Of a plain transformers model."""
    return reference_log_probs(reference_model(folder), rows)


@pytest.mark.parametrize("options", [LORA, FROZEN_TOWER], ids=["lora", "frozen-tower"])
def test_a_merged_folder_scores_as_the_trained_model(
    far: Train, tiny_model_folder: Path, tmp_path: Path, rows: list[ScoringRow], options: tuple[str, ...]
) -> None:
    finished = far(*options)
    checkpoint = finished.folder / "global_step_2"
    assert adapter_base(checkpoint / "actor") == (str(tiny_model_folder) if options == LORA else None)
    assert merge("--checkpoint", checkpoint, "--out", tmp_path / "merged") == 0
    assert types_of(tmp_path / "merged") == {"float32"}
    assert modes_of(checkpoint) == modes_of(tmp_path / "merged") == {mode_of(checkpoint / FILES_FILE)}
    merged = folder_log_probs(tmp_path / "merged", rows)
    assert largest_gap(merged, finished.actor.score(rows)) < LOG_PROBS
    assert largest_gap(merged, folder_log_probs(tiny_model_folder, rows)) > 0.1


def test_pefts_adapter_alone_merges_into_a_given_base(
    tiny_model_folder: Path, tmp_path: Path, rows: list[ScoringRow], capsys: pytest.CaptureFixture[str]
) -> None:
    """The adapter is written as EasyR1 writes it, in EasyR1's layout. The base that it names needs the user's word.

    The folder of the adapter alone, as TRL's checkpoint, merges into the same weights.
    """
    model, _ = random_adapter(tiny_model_folder, seed=3)
    actor = tmp_path / "global_step_5" / "actor"
    model.save_pretrained(str(actor / "lora_adapter"))
    (actor / "huggingface").mkdir()
    for kind in ("model", "optim", "extra_state"):
        (actor / f"{kind}_world_size_2_rank_0.pt").touch()
    assert "name it with --base" in refusal(capsys, "--checkpoint", actor, "--out", tmp_path / "named")
    base = ("--base", tiny_model_folder)
    assert merge("--checkpoint", tmp_path / "global_step_5", "--out", tmp_path / "named", *base) == 0
    assert merge("--checkpoint", actor / "lora_adapter", "--out", tmp_path / "alone", *base) == 0
    file = actor / "lora_adapter" / "adapter_config.json"
    settings_of_file = json.loads(file.read_text())
    assert settings_of_file["base_model_name_or_path"] == str(tiny_model_folder)
    file.write_text(json.dumps(settings_of_file | {"base_model_name_or_path": "gone/away"}))
    assert merge("--checkpoint", actor, "--out", tmp_path / "given", *base) == 0
    expected = [log_probs.detach() for log_probs in reference_log_probs(model, rows)]
    for name in ("named", "alone", "given"):
        assert largest_gap(folder_log_probs(tmp_path / name, rows), expected) < LOG_PROBS
    assert largest_gap(expected, folder_log_probs(tiny_model_folder, rows)) > 0.1


def types_of(folder: Path) -> set[str]:
    """Of the weights, and those that the configuration states."""
    config = json.loads((folder / "config.json").read_text())
    types = {part["dtype"] for part in (config, config["text_config"], config["vision_config"])}
    for tensor in load_file(folder / "model.safetensors").values():
        types.add(str(tensor.dtype).removeprefix("torch."))
    return types


def mode_of(file: Path) -> str:
    """Who may read the file, as `ls` shows it."""
    return stat.filemode(file.stat().st_mode)


def modes_of(folder: Path) -> set[str]:
    return {mode_of(file) for file in folder.rglob("*") if file.is_file()}


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert merge(*arguments) == 2
    return capsys.readouterr().err


def test_an_impossible_upload_is_refused_before_the_merge(
    far: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--checkpoint", far(*LORA).folder / "global_step_2", "--out", tmp_path / "merged"]
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no_token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    assert "hf auth login" in refusal(capsys, *arguments, "--upload", "someone/model")
    for name in ("model", "some one/model"):
        assert "give ORG/NAME" in refusal(capsys, *arguments, "--upload", name)
    assert "--upload" in refusal(capsys, *arguments, "--public")
    monkeypatch.setenv("HF_TOKEN", "hf_not_a_token")
    # Nothing listens there: the same failure as without a network, on every machine.
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", "http://127.0.0.1:9")
    unreachable = refusal(capsys, *arguments, "--upload", "someone/model")
    assert "the hub cannot be reached" in unreachable
    assert "hf auth whoami" in unreachable
    assert list(tmp_path.iterdir()) == []


def test_bf16_end_tokens_template_and_image_settings_are_kept(
    far: Train, tiny_model_folder: Path, tiny_processing: Processing, tmp_path: Path
) -> None:
    checkpoint = far(*FROZEN_TOWER).folder / "global_step_2"
    assert merge("--checkpoint", checkpoint, "--out", tmp_path / "merged", "--dtype", "bf16") == 0
    assert types_of(tmp_path / "merged") == {"bfloat16"}
    generation_config = (tmp_path / "merged" / "generation_config.json").read_bytes()
    assert generation_config == (tiny_model_folder / "generation_config.json").read_bytes()
    assert len(json.loads(generation_config)["eos_token_id"]) == 2
    merged = Processing(str(tmp_path / "merged"))
    assert merged.eos_token_ids == tiny_processing.eos_token_ids
    text = "Find x in <|im_end|>."
    image = picture(5, (96, 64))
    of_merged = encoded(merged, text, image)
    of_base = encoded(tiny_processing, text, image)
    assert of_merged.token_ids == of_base.token_ids
    assert of_merged.images is not None
    assert of_base.images is not None
    assert torch.equal(of_merged.images.tensors["pixel_values"], of_base.images.tensors["pixel_values"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged"]


def test_a_run_with_its_own_chat_template_hands_it_on(train: Train, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("Q: {{ messages[0]['content'] | map(attribute='text') | join('<|image_pad|>') }} A:")
    rows = write_lines(tmp_path / "text.jsonl", ({"problem": f"What is {n}?", "answer": "1"} for n in range(8)))
    done = train(*LORA, f"data.override_chat_template={template}", ONE_STEP, f"data.train_files={rows}")
    arguments = ["--checkpoint", done.folder / "global_step_1", "--out", tmp_path / "merged"]
    assert merge(*arguments) == 2  # the record alone may not name a file of this machine
    assert merge(*arguments, "--chat-template", template) == 0
    merged = Processing(str(tmp_path / "merged"))
    assert merged.decode(merged.template_ids("2 + 2?")) == "Q: 2 + 2? A:"


def test_weights_alone_merge_and_are_refused_by_a_resume(train: Train, tiny_run: list[str], tmp_path: Path) -> None:
    options = [*FULL, "worker.actor.fsdp.mp_param_dtype=fp32", "trainer.save_model_only=true"]
    finished = train(*options)
    out = tmp_path / "merged"
    checkpoint = finished.folder / "global_step_2"
    assert sorted(path.name for path in (checkpoint / "actor").iterdir()) == ["distributed"]
    weights = sum(tensor.nbytes for tensor in finished.parameters.values())
    written = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    assert weights < written < 1.2 * weights
    assert merge("--checkpoint", checkpoint, "--out", out, "--dtype", "fp32") == 0
    merged = load_file(out / "model.safetensors")
    assert (
        differing(merged, {name.removeprefix("model."): weight for name, weight in finished.parameters.items()}) == []
    )
    with pytest.raises(CheckpointError, match=r"global_step_2 holds only weights \(trainer.save_model_only\)"):
        train(*FULL)
    policy = run_policy(checked_config([*tiny_run, *options, f"trainer.save_checkpoint_path={finished.folder}"]))
    policy.begin()
    assert policy.checkpoint_to_load() is None, "a restart begins again"


def test_what_cannot_be_merged_ends_with_one_message(
    far: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = far(*LORA).folder
    out = tmp_path / "merged"
    critic = far(*FULL, "algorithm.adv_estimator=gae", ONE_STEP).folder / "global_step_1" / "critic"
    checkpoint = folder / "global_step_2"
    for name, file in (("empty", None), ("full", "notes.txt"), ("ranks/actor", "model_world_size_1_rank_0.pt")):
        (tmp_path / name).mkdir(parents=True)
        if file is not None:
            (tmp_path / name / file).write_text("mine")
    for source, target, words in (
        (tmp_path / "empty", out, "give a folder global_step_<N>"),
        (tmp_path / "nowhere", out, "a folder global_step_<N>"),
        (folder, out, "checkpoints: global_step_1, global_step_2"),
        (checkpoint, tmp_path / "full", "is not empty"),
        (tmp_path / "ranks", out, "scripts/model_merger.py"),
        (critic, out, "weights that the base model lacks: 2 (model.head.bias, model.head.weight)"),
    ):
        assert words in refusal(capsys, "--checkpoint", source, "--out", target)
    gone = refusal(capsys, "--checkpoint", checkpoint, "--out", out, "--base", tmp_path / "gone")
    assert "name it with --base" in gone
    assert str(tmp_path / "gone") in gone
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full", "ranks"]


def test_an_adapter_of_other_weights_is_refused(
    far: Train, tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has 1 weight too few, 1 too many or one of another shape; none is left out."""
    actor = tmp_path / "actor"
    shutil.copytree(far(*LORA).folder / "global_step_2" / "actor", actor)
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
        arguments = ("--checkpoint", actor, "--out", tmp_path / "merged", "--base", tiny_model_folder)
        assert words in refusal(capsys, *arguments)
    assert not (tmp_path / "merged").exists()


def test_shards_without_data_are_refused_by_every_command(
    far: Train, problem_file: Path, parity_reward: str, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each tensor states one row more than it has, sealed again: a merge would write the untrained base."""
    shutil.copytree(far(*FROZEN_TOWER).folder, tmp_path / "copy")
    checkpoint = tmp_path / "copy" / "global_step_2"
    file = checkpoint / "actor" / "distributed" / "rank_0_of_1.safetensors"
    with safe_open(file, "pt") as tensors:
        described = tensors.metadata()
    rows = {name: [first, total + 1] for name, (first, total) in json.loads(described["rows"]).items()}
    save_file(load_file(file), file, described | {"rows": json.dumps(rows)})
    (checkpoint / FILES_FILE).unlink()
    (checkpoint / FILES_FILE).write_text(json.dumps(written_files(checkpoint)))
    words = "does not have every row of '"
    assert words in refusal(capsys, "--checkpoint", checkpoint, "--out", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    settings = [f"data={problem_file}", f"worker.reward.reward_function={parity_reward}", f"out={tmp_path / 'results'}"]
    assert main(["evaluate", f"checkpoint={checkpoint}", "n=1", *settings]) == 2
    assert words in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=words):
        train(*FAR, *FROZEN_TOWER, "trainer.max_steps=3", f"trainer.load_checkpoint_path={checkpoint}")


class Hub:
    """What was published: the files of each repository, and whether it was created as private."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()

    def reply(self, path: str, body: bytes) -> dict[str, Any]:
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return {"url": "https://huggingface.co/someone/model", "name": "someone/model", "id": "1"}
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            return {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        if path == "/api/validate-yaml":
            assert yaml.safe_load(json.loads(body)["content"].split("---\n")[1])["library_name"]
            return {}
        assert "/commit/" in path, path
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return {"commitUrl": "https://huggingface.co/someone/model/commit/1", "commitOid": "1", "success": True}

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        reply: dict[str, Any] = {"type": "user", "name": "someone", "id": "someone/model", "sha": "1"}
        if request.command == "POST":
            self.keys.add(request.headers.get("Authorization"))
            reply = self.reply(request.path, body_of(request))
        content = json.dumps(reply).encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)


def body_of(request: BaseHTTPRequestHandler) -> bytes:
    if request.headers.get("Transfer-Encoding") != "chunked":
        return request.rfile.read(int(request.headers.get("Content-Length", 0)))
    parts = []
    while size := int(request.rfile.readline(), 16):
        parts.append(request.rfile.read(size))
        request.rfile.readline()
    request.rfile.readline()
    return b"".join(parts)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    local_hub = Hub()
    with local_server(local_hub.answer) as address:
        monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", f"http://{address}")
        yield local_hub


def test_checkpoint_and_merged_model_have_cards_and_resume(far: Train, train: Train, tmp_path: Path, hub: Hub) -> None:
    """The second step after a download of the first's checkpoint ends with the weights of the run that never stopped.

    The model that is merged from the checkpoint is published with a card of its own.
    """
    whole = far(*LORA)
    checkpoint = whole.folder / "global_step_1"
    assert cepo.push(checkpoint, "someone/model") == "https://huggingface.co/someone/model/commit/1"
    assert [part["visibility"] for part in hub.created] == ["private"]
    assert hub.keys == {"Bearer hf_of_a_test"}
    adapter = {"adapter_config.json", "adapter_model.safetensors"}
    assert hub.files.keys() >= {"README.md", "curves.png", "config.yaml"} | adapter
    _, front, text = hub.files["README.md"].decode().split("---\n", 2)
    assert yaml.safe_load(front) == {"library_name": "peft", "tags": ["cepo", "reinforcement-learning", "grpo"]}
    titles = [f"## {title}\n" for title in ("Data", "Settings", "Curve", "Run", "Versions")]
    assert all(part in text for part in [*titles, "after step 1", "| algorithm.adv_estimator | grpo |"])
    assert str(whole.folder) not in text
    for name, content in hub.files.items():
        (tmp_path / "downloaded" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "downloaded" / name).write_bytes(content)
    again = f"trainer.load_checkpoint_path={tmp_path / 'downloaded' / 'global_step_1'}"
    resumed = train(*FAR, *LORA, again)
    assert resumed.first_step == 1
    assert differing(resumed.parameters, whole.parameters) == []
    hub.files.clear()
    assert merge("--checkpoint", checkpoint, "--out", tmp_path / "merged", "--upload", "someone/model") == 0
    assert {"README.md", "config.json", "model.safetensors"} <= set(hub.files)
    assert "library_name: transformers" in hub.files["README.md"].decode()
