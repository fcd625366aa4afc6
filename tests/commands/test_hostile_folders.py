"""Folders of a stranger: every command ends with one message or the page, shows and changes no other file, and never waits."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import json_files
import pyarrow
import pyarrow.parquet
import pytest
import torch
from case_files import cases
from PIL import Image
from run_folders import group, rollout, validated, write_checkpoint, write_run
from safetensors.torch import save_file

from cepo.commands.cli import main
from cepo.config import load_config
from cepo.config.worker_schema import FloatType
from cepo.credit.truth import claim_folder
from cepo.errors import CepoError, CheckpointError
from cepo.evaluation.tasks import adapter_of
from cepo.microgeo.world import ASSETS
from cepo.models.pretrained import load_model, read_quantization
from cepo.report.score_tables import Column, ScoreTable, TableRow
from cepo.run_folder.lock import RunLock
from cepo.run_folder.sinks.base import RunDescription
from cepo.run_folder.sinks.tracker import build_tracker
from cepo.terminal.lines import LogHandler
from cepo.trainer.checkpoints import CheckpointStore, TrainerState
from cepo.trainer.protocol import Backend
from cepo.workers.merged_model import BaseModel, merge_checkpoint

pytestmark = pytest.mark.heavy

SECRET = "s3cret of another file"
TRACE = "rollouts/step_00000001.parquet"
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
Attack = Callable[[Path], object]


def free(path: Path) -> Path:
    """The path, within an existing folder and with nothing there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        path.rename(path.parent / "put_aside")
    path.unlink(missing_ok=True)
    return path


def pipe(name: str) -> Attack:
    return lambda folder: os.mkfifo(free(folder / name))


def link(name: str, target: str) -> Attack:
    """A link, whose target is relative to the folder above the run's."""
    return lambda folder: free(folder / name).symlink_to(folder.parent / target)


def text(name: str, content: str | bytes) -> Attack:
    return lambda folder: free(folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def huge(name: str) -> Attack:
    """A file of 10^12 bytes, which takes no space on the disk."""

    def apply(folder: Path) -> None:
        free(folder / name).touch()
        os.truncate(folder / name, 10**12)

    return apply


FORMS: dict[str, Callable[[str], Attack]] = {
    "a pipe": pipe,
    "a device": lambda name: link(name, "/dev/zero"),
    "a file from elsewhere": lambda name: link(name, "victim/secret.txt"),
    "a huge file": huge,
}


def irregular(*names: str) -> dict[str, Attack]:
    """Each file in each form that is no file of a run."""
    return {f"{form} for {name}": attack(name) for name in names for form, attack in FORMS.items()}


def trace(change: Callable[[Any], Any]) -> Attack:
    return lambda folder: pyarrow.parquet.write_table(
        change(pyarrow.parquet.read_table(folder / TRACE)), folder / TRACE
    )


def column(table: Any, name: str, values: Any) -> Any:
    return table.set_column(table.column_names.index(name), table.schema.field(name), values)


def picture(content: bytes) -> Attack:
    """An image that the trace names by the digest of its content, as a genuine one."""

    def apply(folder: Path) -> None:
        name = f"{sha256(content).hexdigest()[:32]}.png"
        (folder / "images" / name).write_bytes(content)
        names = pyarrow.array([[name]], type=pyarrow.list_(pyarrow.string()))
        trace(lambda table: column(table, "images", names))(folder)

    return apply


def not_utf8(table: Any) -> Any:
    validity, offsets, _ = pyarrow.array(["abcd"]).buffers()
    broken = pyarrow.py_buffer(b"ab\xff\xfe")
    return column(table, "response", pyarrow.Array.from_buffers(pyarrow.string(), 1, [validity, offsets, broken]))


REPORTED: dict[str, Attack] = {
    **irregular("metrics.jsonl", "config.yaml", "generations.jsonl", "rollouts/step_00000002.parquet"),
    "steps from elsewhere": link("rollouts", "victim/rollouts"),
    "images from elsewhere": link("images", "victim"),
    "text that is not UTF-8": trace(not_utf8),
    "a temperature of text": text("config.yaml", "worker: {rollout: {temperature: hot}}"),
    "a seed of text": text("config.yaml", "trainer: {seed: [1]}"),
    "methods in a list": text("config.yaml", "algorithm: [1]"),
    "a section of a number": text("config.yaml", "algorithm: {adv_estimator: cepo, weight: 5}"),
    "a method of a number": text("config.yaml", "algorithm: {adv_estimator: cepo, sdpo: 5}"),
    "an EPS image": picture(EPS),
    "an image that is text": picture(SECRET.encode()),
}  # fmt: skip
SHOWN: dict[str, Attack] = {
    "a step without a number": text("rollouts/step_x.parquet", "x"),
    "markup in the method's name": text("config.yaml", "algorithm: {adv_estimator: '[/]'}"),
    "markup in every key": text("config.yaml", "'[/b]': {'[link=file:///]': '[bold]'}"),
    "times that are not finite": text("metrics.jsonl", '{"step": 1, "timing_s/step": NaN, "tokens/generate": null}\n'),
    "counts that are not finite": text("metrics.jsonl", '{"step": 0, "val/accuracy": NaN, "val/num_samples": NaN}\n'),
}


CONTROL = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Another folder of this machine."""
    folder = tmp_path / "victim"
    write_run(folder, validated(0.3), groups=[group(1, [rollout(right=True)])])
    (folder / "secret.txt").write_text(SECRET)
    Image.new("RGB", (4, 4)).save(folder / "holiday.png")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    groups = [group(1, [rollout(right=True)])]
    sample = {"prompt_id": "1", "accuracy": 1.0}
    return write_run(tmp_path / "run", validated(0.3, 0.5), groups=groups, generations={0: [sample], 1: [sample]})


def refused(arguments: Sequence[object], victim: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs a command that ends with 2; returns its message, which has no text of another file."""
    victims_content = contents(victim)
    assert main([str(argument) for argument in arguments]) == 2
    output = capsys.readouterr()
    assert SECRET.split()[0] not in output.out + output.err
    assert contents(victim) == victims_content
    return output.err


@pytest.mark.parametrize("name", REPORTED)
def test_a_report_refuses_a_hostile_folder(
    folder: Path, victim: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def no_program(*_: object, **__: object) -> None:
        raise AssertionError("a program was started")

    monkeypatch.setattr(subprocess, "Popen", no_program)
    REPORTED[name](folder)
    assert str(folder) in refused(["report", folder], victim, capsys) or "image" in name
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize("name", SHOWN)
def test_a_report_shows_odd_text_as_text(folder: Path, name: str) -> None:
    SHOWN[name](folder)
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    for data in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page):
        json.loads(data, parse_constant=pytest.fail)  # NaN is none of JSON's numbers, and a browser's script would end


def test_no_control_character_of_a_name_reaches_the_terminal(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It could rename the window, clear the screen, or turn the letters of a name around."""
    (folder / "config.yaml").write_text(f"algorithm: {{adv_estimator: {json.dumps(CONTROL)}}}")
    named = folder.rename(tmp_path / f"run {CONTROL}")
    for command in (["report", str(named)], ["compare", str(named), str(named)], ["report", str(named / CONTROL)]):
        main(command)
    output = capfd.readouterr()
    assert "run \N{REPLACEMENT CHARACTER}" in output.out
    assert not set(CONTROL) & set(output.out + output.err) - set("]0;title[2J31m")


def test_no_control_character_of_a_response_is_in_a_page(tmp_path: Path) -> None:
    """An editor or a terminal that shows the page's text would follow them."""
    sample = {"prompt_id": "1", "accuracy": 1.0, "prompt": CONTROL, "response": f"so{CONTROL}", "ground_truth": CONTROL}
    run = write_run(tmp_path / "run", validated(0.3, 0.5), generations={0: [sample], 1: [sample]})
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "so\N{REPLACEMENT CHARACTER}]0;title" in page
    assert not set(CONTROL) & set(page) - set("]0;title[2J31m")


def test_no_control_character_of_a_name_reaches_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    record = logging.LogRecord("cepo", logging.INFO, "file", 1, "reading %s", (f"a\t{CONTROL}\n",), None)
    LogHandler().emit(record)
    line = capfd.readouterr().err
    assert "reading a" in line
    assert line.isprintable() or set(filter(lambda each: not each.isprintable(), line)) == {"\t", "\n"}


@pytest.mark.parametrize("attack", FORMS.values(), ids=FORMS)
def test_a_comparison_never_waits_for_a_checkpoints_state(
    folder: Path, tmp_path: Path, attack: Callable[[str], Attack]
) -> None:
    """It reads the training data's checksum there, which may be absent."""
    attack("global_step_2/trainer_state.json")(folder)
    second_run = write_run(tmp_path / "seed", validated(0.3, 0.5))
    assert main(["compare", str(folder), str(second_run)]) == 0


HOSTILE_NAME = "a\n\\input{/etc/passwd}\r\\write18{id}\u2028% <script>alert(1)</script> | [x](javascript:y) &lt;"


def test_no_text_of_a_table_leaves_its_cell_or_comment() -> None:
    def table_of(name: str) -> ScoreTable:
        row = TableRow(name=name, group=name, cells={name: name})
        return ScoreTable(title=name, columns=[Column(name=name)], rows=[row], notes=[name])

    table = table_of(HOSTILE_NAME)
    plain = table_of("x")
    assert len(table.latex().splitlines()) == len(plain.latex().splitlines())
    uncommented = [line for line in table.latex().splitlines() if not line.startswith("%")]
    assert not any("\\input" in line or "\\write" in line for line in uncommented)
    assert len(table.markdown().splitlines()) == len(plain.markdown().splitlines())
    assert "<script" not in table.markdown().replace("\\<", "")
    assert "[x]" not in table.markdown()


RESULTS = {"model": "m", "benchmarks": {"b": {"accuracy": {"mean": 0.5, "error": 0.1, "num_clusters": 2}}}}
ROW = {"benchmark": "b", "problem_id": "1", "cluster": "1", "ground_truth": "2", "correct": True}


def evaluated(folder: Path) -> Path:
    folder.mkdir()
    (folder / "evaluation.json").write_text(json.dumps(RESULTS))
    (folder / "generations.jsonl").write_text(json.dumps(ROW) + "\n")
    return folder


COMPARED: dict[str, Attack] = {
    **irregular("generations.jsonl", "evaluation.json"),
    "results with no number": text("evaluation.json", json.dumps(RESULTS).replace("0.5", '"x"')),
    "no benchmark": text("evaluation.json", json.dumps(RESULTS | {"benchmarks": {}})),
}


@pytest.mark.parametrize("name", COMPARED)
def test_a_comparison_refuses_a_hostile_evaluation(
    tmp_path: Path, victim: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    first = evaluated(tmp_path / "first")
    second = evaluated(tmp_path / "second")
    COMPARED[name](second)
    refused(["compare", first, second], victim, capsys)


def test_a_benchmark_named_in_markup_is_compared(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (evaluated(tmp_path / name) / "generations.jsonl").write_text(json.dumps(ROW | {"benchmark": "[/]"}) + "\n")
    assert main(["compare", str(tmp_path / "first"), str(tmp_path / "second")]) == 0


EVALUATED = irregular("config.yaml") | {
    "a pipe for the adapter's settings": pipe("global_step_2/actor/lora_adapter/adapter_config.json"),
}


@pytest.mark.parametrize("command", ["evaluate", "merge", "credit"])
@pytest.mark.parametrize("name", EVALUATED)
def test_a_hostile_checkpoint_is_refused(
    tmp_path: Path, victim: Path, capsys: pytest.CaptureFixture[str], name: str, command: str
) -> None:
    step = write_checkpoint(tmp_path / "run")
    EVALUATED[name](tmp_path / "run")
    arguments: dict[str, list[object]] = {
        "evaluate": [f"checkpoint={step}", "dry_run=true"],
        "merge": ["--checkpoint", step, "--out", tmp_path / "out"],
        "credit": ["methods=grpo", f"checkpoint={step}", "dry_run=true", f"out={tmp_path / 'out'}"],
    }
    refused([command, *arguments[command]], victim, capsys)
    assert not (tmp_path / "out").exists()


ADAPTERS: dict[str, Attack] = {
    **irregular("lora_adapter/adapter_model.safetensors", "lora_adapter/quantization_config.json"),
    "settings from elsewhere": link("lora_adapter/adapter_config.json", "victim/secret.txt"),
    "settings in a list": text("lora_adapter/adapter_config.json", "[]"),
    "a rank of text": text("lora_adapter/adapter_config.json", '{"r": "many"}'),
    "no rank": text("lora_adapter/adapter_config.json", "{}"),
    "weights of text": text("lora_adapter/adapter_model.safetensors", "x" * 100),
}


def refused_adapter(actor: Path, out: Path, words: str | None = None) -> None:
    """Neither an evaluation nor a merge takes the adapter."""
    for reading in (lambda: adapter_of(actor), lambda: merge_checkpoint(actor, out, BaseModel(path=str(ASSETS)))):
        with pytest.raises(CheckpointError, match=words) as caught:
            reading()
        assert SECRET.split()[0] not in str(caught.value)
    assert not out.exists()


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_hostile_adapter_is_refused(tmp_path: Path, victim: Path, name: str) -> None:
    actor = write_checkpoint(tmp_path / "run") / "actor"
    (tmp_path / "run" / "global_step_2" / "victim").symlink_to(victim)
    ADAPTERS[name](actor)
    refused_adapter(actor, tmp_path / "out")


def adapter(actor: Path, weights: Mapping[str, torch.Tensor], **settings: Any) -> None:
    folder = actor / "lora_adapter"
    save_file(dict(weights), folder / "adapter_model.safetensors")
    plain = {"base_model_name_or_path": "microgeo:model", "peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (folder / "adapter_config.json").write_text(json.dumps(plain | settings))


LAYER = "base_model.model.model.language_model.layers.0.self_attn.q_proj"
ENDLESS = r"((\w|\.)+)+$!"
"""A pattern that takes forever to find that a name does not match."""
MISLEADING = cases(__file__, "misleading_adapters.yaml")
MISLEADING["ranks for patterns"] = ({"rank_pattern": {ENDLESS: 8}}, "settings that cepo does not read: rank_pattern")


@pytest.mark.parametrize("name", MISLEADING)
def test_an_adapter_that_means_something_else_is_refused(tmp_path: Path, name: str) -> None:
    settings, words = MISLEADING[name]
    actor = write_checkpoint(tmp_path / "run") / "actor"
    adapter(actor, {f"{LAYER}.lora_A.weight": torch.ones(4, 64)}, **settings)
    refused_adapter(actor, tmp_path / "out", words)


@pytest.mark.parametrize("kind", ["int8", "complex64", "float8_e4m3fn"])
def test_a_base_in_a_type_of_no_training_asks_for_one(tmp_path: Path, kind: str) -> None:
    base = shutil.copytree(ASSETS, tmp_path / "base")
    json_files.merge(base / "config.json", {"dtype": kind})
    actor = write_checkpoint(tmp_path / "run") / "actor"
    factors = {f"{LAYER}.lora_{part}.weight": torch.ones(shape) for part, shape in (("A", (4, 128)), ("B", (128, 4)))}
    adapter(actor, factors)
    with pytest.raises(CheckpointError, match=f"declares its weights in torch.{kind}; choose a type with --dtype"):
        merge_checkpoint(actor, tmp_path / "out", BaseModel(path=str(base)))


@pytest.mark.parametrize("kind", [torch.int8, torch.int64, torch.bool, torch.complex64])
def test_an_adapter_of_no_weights_is_refused(tmp_path: Path, kind: torch.dtype) -> None:
    """PEFT would convert them: numbers of 8 bits without their scales, and complex ones without their second part."""
    actor = write_checkpoint(tmp_path / "run") / "actor"
    adapter(actor, {f"{LAYER}.lora_{part}.weight": torch.ones(4, 4, dtype=kind) for part in "AB"})
    refused_adapter(actor, tmp_path / "out", rf"q_proj\.lora_A\.weight' in {kind}, which is no type of weights")


def test_a_module_without_its_saved_weights_is_refused(tmp_path: Path) -> None:
    actor = write_checkpoint(tmp_path / "run") / "actor"
    adapter(actor, {f"{LAYER}.lora_A.weight": torch.ones(4, 128)}, modules_to_save=["lm_head"])
    with pytest.raises(CheckpointError, match=r"does not fit this base model: .*lm_head"):
        merge_checkpoint(actor, tmp_path / "out", BaseModel(path=str(ASSETS)))


def test_a_message_names_few_of_many_settings(tmp_path: Path) -> None:
    actor = write_checkpoint(tmp_path / "run") / "actor"
    adapter(
        actor, {f"{LAYER}.lora_A.weight": torch.ones(4, 4)}, **{f"{'x' * 1000}{number}": 1 for number in range(1000)}
    )
    with pytest.raises(CheckpointError, match=r"settings that cepo does not read: x{100}, x{100}") as caught:
        adapter_of(actor)
    assert len(str(caught.value)) < 2000


QUANTIZATION = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
}


def test_settings_of_a_quantised_base_are_a_list(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="a base in 4 bits needs bitsandbytes")
    (tmp_path / "quantization_config.json").write_text(
        json.dumps(QUANTIZATION | {"llm_int8_threshold": "x", "load_in_4bit": False})
    )
    settings = read_quantization(tmp_path)
    assert settings is not None
    assert settings.load_in_4bit
    assert settings.bnb_4bit_compute_dtype is torch.bfloat16
    (tmp_path / "quantization_config.json").write_text(json.dumps(QUANTIZATION | {"bnb_4bit_compute_dtype": "load"}))
    with pytest.raises(CheckpointError, match="cannot be read as settings of a 4-bit base"):
        read_quantization(tmp_path)


def test_an_adapter_with_a_pattern_has_the_layers_of_its_tensors(tmp_path: Path) -> None:
    actor = write_checkpoint(tmp_path / "run") / "actor"
    weights = {f"{LAYER}.lora_{part}.weight": torch.ones(4, 4) for part in "AB"}
    adapter(actor, weights, target_modules=ENDLESS, exclude_modules=ENDLESS, layers_pattern=ENDLESS)
    merged_adapter = adapter_of(actor)
    assert merged_adapter is not None
    assert merged_adapter.adapter_config["target_modules"] == [LAYER.removeprefix("base_model.model.")]
    assert ENDLESS not in merged_adapter.adapter_config.values()


@pytest.mark.parametrize(("scale", "dtype"), [(1e308, None), (1e6, "fp16")])
def test_a_merge_writes_no_weights_that_are_not_finite(tmp_path: Path, scale: float, dtype: FloatType | None) -> None:
    """The scale of this adapter is beyond float32, or gives weights beyond fp16, whose largest number is 65,504."""
    model = load_model(str(ASSETS), dtype=torch.float32, trust_remote_code=False, override_config={})
    weight = model.get_parameter(LAYER.removeprefix("base_model.model.") + ".weight")
    actor = write_checkpoint(tmp_path / "run") / "actor"
    num_outputs, num_inputs = weight.shape
    factors = {
        f"{LAYER}.lora_A.weight": torch.ones(4, num_inputs),
        f"{LAYER}.lora_B.weight": torch.ones(num_outputs, 4),
    }
    adapter(actor, factors, lora_alpha=scale)
    with pytest.raises(
        CheckpointError, match=r"gives weights that are not finite in torch\.float\d+, such as .*q_proj"
    ):
        merge_checkpoint(actor, tmp_path / "out", BaseModel(path=str(ASSETS)), dtype=dtype)
    assert not (tmp_path / "out").exists()


RECORDS = ("metrics.jsonl", "config.yaml")
RESUMED: dict[str, Attack] = {
    **{f"{form} for {name}": FORMS[form](name) for form in ("a pipe", "a file from elsewhere") for name in RECORDS},
    "metrics that do not exist elsewhere": link("metrics.jsonl", "victim/new.txt"),
    "samples from elsewhere": link("generations.jsonl", "victim/metrics.jsonl"),
    "steps from elsewhere": link("rollouts", "victim/rollouts"),
    "images from elsewhere": link("images", "victim"),
    "events from elsewhere": link("tensorboard", "victim"),
    "a database elsewhere": link("mlflow", "victim"),
    "a step to be renamed": link("rollouts/.step_00000003.parquet", "victim/secret.txt"),
    "an image to be renamed": link(f"images/.{'0' * 32}.png", "victim/secret.txt"),
    "the log of a worker": link("logs/rank_0.log", "victim/secret.txt"),
    "a database in a folder": link("mlflow/mlflow.db", "victim/secret.txt"),
    "folders of a tracker": link("wandb", "victim"),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resume_changes_no_file_outside_its_folder(folder: Path, victim: Path, name: str) -> None:
    RESUMED[name](folder)
    victims_content = contents(victim)
    run = RunDescription(folder=folder, config_text="a: 1\n", max_steps=5, resumed_step=0, max_rollouts_mb=0)
    with pytest.raises(CepoError):
        build_tracker(["file", "tensorboard"], run)
    assert contents(victim) == victims_content


@pytest.mark.parametrize(
    "attack", [link("run.lock", "victim/secret.txt"), link("run.lock", "victim/new"), pipe("run.lock")]
)
def test_no_other_file_is_locked(folder: Path, victim: Path, attack: Attack) -> None:
    attack(folder)
    victims_content = contents(victim)
    with pytest.raises(CepoError, match=r"run\.lock is a link, a pipe or a device"):
        RunLock(folder).acquire()
    assert contents(victim) == victims_content


def test_a_hostile_state_is_refused_by_a_resume(tmp_path: Path) -> None:
    huge("trainer_state.json")(tmp_path / "global_step_1")
    store = CheckpointStore(tmp_path, keep=-1, identity={})
    with pytest.raises(CepoError):
        store.read(tmp_path / "global_step_1")
    assert store.find_last() is None


def test_pruning_leaves_links_and_foreign_names(tmp_path: Path, victim: Path) -> None:
    (victim / "trainer_state.json").write_text("{}")
    run = tmp_path / "run"
    odd = [run / f"global_step_{name}" for name in ("01", "\N{ARABIC-INDIC DIGIT TWO}", "1\n", "+1")]
    for folder in (run / "global_step_1", *odd):
        text("trainer_state.json", "{}")(folder)
    (run / "global_step_0").symlink_to(victim)
    store = CheckpointStore(run, keep=1, identity={})
    without_weights = SimpleNamespace(save=lambda folder: (folder / "actor").mkdir())
    store.save(TrainerState(step=3), cast(Backend, without_weights))
    assert sorted(run.glob("global_step_*")) == sorted([run / "global_step_0", run / "global_step_3", *odd])
    assert (victim / "secret.txt").is_file()


MEASURED: list[Attack] = [
    link("measurement.json", "victim/secret.txt"), pipe("measurement.json"), link("images", "victim"),
    link("gradients/1.new.npy", "victim/secret.txt"),
]  # fmt: skip


@pytest.mark.parametrize("attack", MEASURED)
def test_a_hostile_measurement_is_not_resumed(tmp_path: Path, victim: Path, attack: Attack) -> None:
    folder = tmp_path / "measured"
    folder.mkdir()
    attack(folder)
    with pytest.raises(CepoError) as caught:
        claim_folder(folder, {}, load_config(["config=configs/microgeo/base.yaml"]))
    assert SECRET.split()[0] not in str(caught.value)
    assert victim.is_dir()


@pytest.mark.parametrize("attack", [*irregular("answer.txt").values(), text("answer.txt", b"\xff")])
def test_a_given_response_is_a_regular_text(
    tmp_path: Path, victim: Path, capsys: pytest.CaptureFixture[str], attack: Attack
) -> None:
    attack(tmp_path)
    base = ["show", "microgeo:model", "microgeo:train", "config=configs/microgeo/base.yaml"]
    assert "answer.txt" in refused([*base, "--response", tmp_path / "answer.txt"], victim, capsys)
