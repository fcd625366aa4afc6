"""A run's record: it holds no secrets; read back, it is data that chooses no code and reads nothing of this machine."""

from __future__ import annotations

import contextlib
import io
import stat
from pathlib import Path

import pytest
import yaml
from run_folders import write_checkpoint

from cepo.cli import main
from cepo.commands.checkpoint_arguments import find_base
from cepo.config import dump_for_record, load_config
from cepo.config.record import decisive_settings, masked_argument, recorded_for_evaluation, recorded_model
from cepo.errors import CheckpointError, ConfigError
from cepo.report.recorded_run import load_run
from cepo.tracking.external import config_tree
from cepo.tracking.sinks import RunDescription, build_tracker

CODE = "import os\nos.mkdir({trace!r})\ndef reward(samples):\n    return [{{'overall': 0.0}} for _ in samples]\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "it_ran"


@pytest.fixture
def hostile(tmp_path: Path, trace: Path) -> Path:
    """A file that makes a folder where it is imported."""
    file = tmp_path / "hostile.py"
    file.write_text(CODE.format(trace=str(trace)), encoding="utf-8")
    return file


def dry_run(checkpoint: Path, *arguments: str) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(["evaluate", f"checkpoint={checkpoint}", "dry_run=true", *arguments])
    return code, printed.getvalue()


def test_plugins_of_the_record_are_not_imported(tmp_path: Path, hostile: Path, trace: Path) -> None:
    checkpoint = write_checkpoint(
        tmp_path / "run", f"trainer.plugins=[{hostile}]", "algorithm.adv_estimator=of_the_plugin"
    )
    code, text = dry_run(checkpoint)
    assert code == 0
    assert "microgeo:validation" in text
    assert not trace.exists()
    code, _ = dry_run(checkpoint, f"trainer.plugins=[{hostile}]")
    assert code == 0
    assert trace.exists(), "the user's own word imports it"


@pytest.mark.parametrize("key", ["worker.reward.reward_function", "worker.reward.answer_function"])
def test_a_recorded_reward_file_needs_the_users_word(
    tmp_path: Path, hostile: Path, trace: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    function = f"{hostile}:reward"
    checkpoint = write_checkpoint(tmp_path / "run", f"{key}={function}")
    assert dry_run(checkpoint)[0] == 2
    message = capsys.readouterr().err
    assert f"rewarded by {function}, a file that is not part of cepo and would run here" in message
    assert f"give {key}={function}, or config={tmp_path / 'run' / 'config.yaml'}" in message
    for word in (f"{key}={function}", f"config={tmp_path / 'run' / 'config.yaml'}"):
        code, text = dry_run(checkpoint, word)
        assert code == 0
        assert key.endswith("answer_function") or function in text
    assert not trace.exists()


def test_remote_code_needs_the_users_own_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = write_checkpoint(tmp_path / "run", "worker.actor.model.trust_remote_code=true")
    base = find_base(checkpoint / "actor")
    assert base.path == "microgeo:model"
    assert not base.trust_remote_code
    assert "worker.actor.model.trust_remote_code is not taken from a run's own record" in caplog.text
    assert find_base(checkpoint / "actor", trust_remote_code=True).trust_remote_code
    config = load_config([], recorded=recorded_for_evaluation(tmp_path / "run" / "config.yaml", ()))
    assert not config.worker.actor.model.trust_remote_code


@pytest.mark.parametrize("key", ["data.override_chat_template", "data.format_prompt"])
def test_a_recorded_template_reads_no_local_file(tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One in the run folder is part of the run; any other file needs the user's word, also behind a link."""
    secret = tmp_path / "secret.txt"
    secret.write_text("s3cret")
    link, own = tmp_path / "link" / "template.jinja", tmp_path / "own" / "template.jinja"
    for folder, file in (("file", secret), ("link", link), ("own", own)):
        write_checkpoint(tmp_path / folder, f"{key}={file}")
    link.symlink_to(secret)
    own.write_text("{{ content }}")
    for folder, file in (("file", secret), ("link", link)):
        assert dry_run(tmp_path / folder / "global_step_2")[0] == 2
        message = capsys.readouterr().err
        assert f"{key} is {file}, which is not in the run's folder" in message
        assert f"give {key}={file}" in message
        assert "s3cret" not in message
        assert recorded_for_evaluation(tmp_path / folder / "config.yaml", (key,))
    section, name = key.split(".")
    assert recorded_for_evaluation(tmp_path / "own" / "config.yaml", ()).tree[section][name] == str(own)


def test_a_merge_takes_a_recorded_template_of_the_run_only(tmp_path: Path) -> None:
    secret, own = tmp_path / "secret.txt", tmp_path / "own" / "template.jinja"
    actors = {
        file: write_checkpoint(tmp_path / name, f"data.override_chat_template={file}") / "actor"
        for name, file in (("file", secret), ("own", own))
    }
    secret.write_text("s3cret")
    own.write_text("{{ messages }}")
    with pytest.raises(ConfigError, match=rf"is {secret}, which is not in the run.* give --chat-template {secret}"):
        find_base(actors[secret])
    assert find_base(actors[secret], chat_template=secret).chat_template == "s3cret"
    assert find_base(actors[own]).chat_template == "{{ messages }}"
    with pytest.raises(CheckpointError, match=r"missing\.jinja does not exist.*--chat-template"):
        find_base(actors[own], chat_template=tmp_path / "missing.jinja")


@pytest.mark.parametrize("text", ["${oc.env:CEPO_SECRET}", "x\\\\${oc.env:CEPO_SECRET}", "\\${${oc.env:CEPO_SECRET}}"])
def test_the_environment_is_never_read_for_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("CEPO_SECRET", "s3cret")
    checkpoint = write_checkpoint(tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    recorded = file.read_text(encoding="utf-8")
    file.write_text(recorded.replace("model_path: microgeo:model", f"model_path: '{text}'"), encoding="utf-8")
    assert text in file.read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match=r"line \d+: worker\.actor\.model\.model_path refers to .* give worker"):
        recorded_for_evaluation(file, ())
    with pytest.raises(ConfigError, match=r"model_path refers to"):
        find_base(checkpoint / "actor")
    assert find_base(checkpoint / "actor", path="mine").path == "mine"
    assert recorded_for_evaluation(file, ("worker.actor.model.model_path",)).tree["data"]["prompt_key"] == "problem"


def test_a_report_shows_a_reference_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CEPO_SECRET", "s3cret")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n', encoding="utf-8")
    text = "algorithm:\n  adv_estimator: ${oc.env:CEPO_SECRET}\n  note: \\${kept}\n"
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    run = load_run(tmp_path)
    assert run.estimator == "${oc.env:CEPO_SECRET}"
    assert run.config["algorithm"]["note"] == "${kept}"


def test_what_describes_the_run_is_taken_whole(tmp_path: Path) -> None:
    settings = ["data.max_response_length=77", "worker.rollout.temperature=0.7", "algorithm.correct_threshold=0.25"]
    nested = "worker.actor.model.override_config={rope: {a.b: 1, factor: 2.0}, name: 'a $ {x}'}"
    write_checkpoint(tmp_path / "run", *settings, nested)
    config = load_config([], recorded=recorded_for_evaluation(tmp_path / "run" / "config.yaml", ()))
    assert config.data.max_response_length == 77
    assert config.worker.rollout.temperature == 0.7
    assert config.algorithm.correct_threshold == 0.25
    assert config.worker.actor.model.override_config == {"rope": {"a.b": 1, "factor": 2.0}, "name": "a $ {x}"}
    model, template = recorded_model(tmp_path / "run" / "config.yaml", ())
    assert model["override_config"]["rope"]["a.b"] == 1
    assert template is None


def test_merge_says_what_is_no_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = write_checkpoint(tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text("worker: 5\n", encoding="utf-8")
    assert main(["merge", "--checkpoint", str(checkpoint), "--out", str(tmp_path / "out")]) == 2
    assert "worker.actor.model is not a section" in capsys.readouterr().err


BASE = "config=configs/microgeo/base.yaml"
SECRET = "s3cret-value"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CEPO_KEY", SECRET)


@pytest.mark.parametrize(
    "argument",
    [
        "worker.reward.reward_function_kwargs={format_weight: 0.5, note: '${oc.env:CEPO_KEY}'}",
        "worker.reward.reward_function_kwargs={nested: {list: [1, 'x-${oc.env:CEPO_KEY}']}}",
        f"worker.reward.reward_function_kwargs={{api_key: {SECRET}}}",
        f"worker.reward.reward_function_kwargs={{judge: {{hf-token: {SECRET}}}}}",
        f"worker.reward.reward_function_kwargs={{headers: {{Authorization: Bearer {SECRET}}}}}",
        f"worker.reward.reward_function_kwargs={{auth: {SECRET}, pwd: {SECRET}, openai_key: [{SECRET}]}}",
        f"worker.reward.reward_function_kwargs={{private_key: '{SECRET}'}}",
        f"worker.reward.reward_function_kwargs={{urls: ['https://judge:{SECRET}@host:8000/v1']}}",
        "trainer.project_name=${oc.env:CEPO_KEY}",
        "data.train_files=['${oc.env:CEPO_KEY}', other]",
    ],
)
def test_a_secret_is_used_and_not_recorded(tmp_path: Path, argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config([BASE, argument, "trainer.experiment_name=of-${trainer.project_name}"])
    assert SECRET in repr(config), "the run itself has it"
    text = dump_for_record(config)
    run = RunDescription(folder=tmp_path, config_text=text, max_steps=1)
    monkeypatch.setattr("sys.argv", ["cepo", argument])
    build_tracker(["file"], run).close()
    for file in tmp_path.iterdir():
        assert SECRET not in file.read_text(), file
    assert SECRET not in str(config_tree(run))
    for name in ("config.yaml", "environment.json"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600, name


def test_a_reference_is_recorded_as_written_and_resolves_again(tmp_path: Path) -> None:
    arguments = [BASE, "trainer.project_name=${oc.env:CEPO_KEY}"]
    config = load_config(arguments)
    text = dump_for_record(config)
    assert yaml.safe_load(text)["trainer"]["project_name"] == "${oc.env:CEPO_KEY}"
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    assert load_config([f"config={tmp_path / 'config.yaml'}"]) == config


@pytest.mark.parametrize(
    ("argument", "recorded"),
    [
        ("a.api_key=abc", "a.api_key=***"),
        ("a.OPENAI_API_KEY=abc", "a.OPENAI_API_KEY=***"),
        ("--token=abc", "--token=***"),
        ('a.kwargs={url: "x", password: "a b", n: 3}', 'a.kwargs={url: "x", password: ***, n: 3}'),
        ("a.kwargs={'secret':abc}", "a.kwargs={'secret':***}"),
        ("a.api_key=${oc.env:KEY}", "a.api_key=${oc.env:KEY}"),
        ("a.kwargs={Authorization: Bearer abc, n: 3}", "a.kwargs={Authorization: ***, n: 3}"),
        ("a.kwargs={url: https://me:abc@host/x}", "a.kwargs={url: https://***@host/x}"),
        ("a.url=https://host:8000/x@y", "a.url=https://host:8000/x@y"),
        ("data.prompt_key=problem", "data.prompt_key=problem"),
        ("worker.rollout.max_num_batched_tokens=8192", "worker.rollout.max_num_batched_tokens=8192"),
        ("a.tokenizer_path=b", "a.tokenizer_path=b"),
    ],
)
def test_arguments_are_masked_by_their_names(argument: str, recorded: str) -> None:
    assert masked_argument(argument) == recorded


def test_a_checkpoint_records_a_digest_of_the_rewards_keywords() -> None:
    """Only their equality matters to a resume, and other keywords than those with secret names may be confidential."""

    def recorded(*arguments: str) -> dict[str, object]:
        return decisive_settings(load_config([BASE, *arguments]))

    one, same, other = (
        recorded(f"worker.reward.reward_function_kwargs={{prompt: {text}}}") for text in (SECRET, SECRET, "x")
    )
    assert SECRET not in str(one)
    assert one == same
    assert {key for key in one if one[key] != other[key]} == {"worker.reward.reward_function_kwargs (digest)"}
