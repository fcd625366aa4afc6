"""A run's record, read back, is data: a stranger's decides what is listed, and no record chooses code or reads secrets."""

from __future__ import annotations

import ast
import contextlib
import io
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from case_files import cases
from local_server import local_server
from pydantic import TypeAdapter
from run_folders import write_checkpoint

from cepo.commands.cli import main
from cepo.commands.measure_credit import make_credit_plan
from cepo.config import dump_for_record, load_config
from cepo.config.paths import PACKAGE_FOLDER, SHIPPED_FOLDER
from cepo.config.schema import RunSettings
from cepo.config.untrusted_record import (
    LISTED_REWARDS,
    read_record,
    recorded_for_evaluation,
    recorded_model,
)
from cepo.data.prompts import UserTemplate
from cepo.errors import CheckpointError, ConfigError
from cepo.files.trees import leaves
from cepo.report.recorded_run import load_run
from cepo.run_folder.own_records import is_own_record, remember_own_record
from cepo.run_folder.sinks.base import RunDescription
from cepo.run_folder.sinks.tracker import build_tracker
from cepo.sections.fields import may_come_from_record
from cepo.workers.named_checkpoint import find_base

BASE = "config=configs/microgeo/base.yaml"
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
def test_an_own_reward_file_needs_the_users_word(
    tmp_path: Path, hostile: Path, trace: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    function = f"{hostile}:reward"
    checkpoint = write_checkpoint(tmp_path / "run", f"{key}={function}", own=True)
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
    link = tmp_path / "link" / "template.jinja"
    run_template = tmp_path / "own" / "template.jinja"
    for folder, file in (("file", secret), ("link", link), ("own", run_template)):
        write_checkpoint(tmp_path / folder, f"{key}={file}")
    link.symlink_to(secret)
    run_template.write_text("{{ content }}")
    for folder, file in (("file", secret), ("link", link)):
        assert dry_run(tmp_path / folder / "global_step_2")[0] == 2
        message = capsys.readouterr().err
        assert f"{key} is {file}, which is not in the run's folder" in message
        assert f"give {key}={file}" in message
        assert "s3cret" not in message
        assert recorded_for_evaluation(tmp_path / folder / "config.yaml", (key,))
    section, name = key.split(".")
    assert recorded_for_evaluation(tmp_path / "own" / "config.yaml", ()).tree[section][name] == str(run_template)


def test_a_merge_takes_a_recorded_template_of_the_run_only(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    run_template = tmp_path / "own" / "template.jinja"
    actors = {
        file: write_checkpoint(tmp_path / name, f"data.override_chat_template={file}") / "actor"
        for name, file in (("file", secret), ("own", run_template))
    }
    secret.write_text("s3cret")
    run_template.write_text("{{ messages }}")
    with pytest.raises(ConfigError, match=rf"is {secret}, which is not in the run.* give --chat-template {secret}"):
        find_base(actors[secret])
    assert find_base(actors[secret], chat_template=secret).chat_template == "s3cret"
    assert find_base(actors[run_template]).chat_template == "{{ messages }}"
    with pytest.raises(CheckpointError, match=r"missing\.jinja does not exist.*--chat-template"):
        find_base(actors[run_template], chat_template=tmp_path / "missing.jinja")


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
    assert dict(leaves(run.config))["algorithm.note"] == "${kept}"


def test_what_describes_an_own_run_is_taken_whole(tmp_path: Path) -> None:
    settings = ["data.max_response_length=77", "worker.rollout.temperature=0.7", "algorithm.correct_threshold=0.25"]
    nested = "worker.actor.model.override_config={rope: {a.b: 1, factor: 2.0}, name: 'a $ {x}'}"
    write_checkpoint(tmp_path / "run", *settings, nested, own=True)
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


TEXTS_OF_RECORDS = {
    *(
        f"data.{name}"
        for name in ("prompt_key", "answer_key", "solution_key", "image_key", "teacher_image_key", "video_key")
    ),
    "data.chat_template_kwargs",
    "algorithm.correct_key",
    "worker.actor.loss_type",
    "worker.actor.model.lora.target_modules",
    "worker.actor.model.lora.exclude_modules",
    "worker.rollout.val_override_config",
}
"""What may be any text or mapping: names of columns and of modules of a model, variables of a template in its sandbox."""


def is_plain(schema: dict[str, Any], definitions: dict[str, Any]) -> bool:
    """Whether a setting is a number, a choice of some words, or a list of these."""
    if "$ref" in schema:
        return is_plain(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        return all(is_plain(alternative, definitions) for alternative in schema["anyOf"])
    if schema.get("type") == "array":
        return is_plain(schema["items"], definitions)
    has_words = "enum" in schema or "const" in schema
    return has_words or schema.get("type") in ("integer", "number", "boolean", "null")


def settings_in(
    schema: dict[str, Any], definitions: dict[str, Any], path: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, inner in schema["properties"].items():
        key = f"{path}.{name}" if path else name
        section = definitions.get(inner.get("$ref", "").rpartition("/")[2], {})
        if section.get("properties") and "description" in section and key not in TEXTS_OF_RECORDS:
            yield from settings_in(section, definitions, key)
        else:
            yield key, inner


def test_a_records_settings_are_numbers_choices_and_listed_texts() -> None:
    """A new setting that may be any text, and so name a file, a host or a program, is listed here by somebody's decision."""
    schema = TypeAdapter(RunSettings).json_schema()
    text_settings: set[str] = set()
    for key, setting in settings_in(schema, schema["$defs"]):
        if may_come_from_record(RunSettings, key) and not is_plain(setting, schema["$defs"]):
            text_settings.add(key)
    assert text_settings == TEXTS_OF_RECORDS


NEEDS_THE_USERS_WORD = [
    "data.train_files", "data.val_files", "data.image_hosts", "data.image_dir", "data.format_prompt",
    "data.override_chat_template", "worker.actor.model.model_path", "worker.actor.model.tokenizer_path",
    "worker.actor.model.override_config", "worker.actor.model.trust_remote_code", "worker.actor.loss",
    "worker.critic.model.model_path", "worker.reward.reward_function", "worker.reward.reward_function_kwargs",
    "worker.reward.answer_function", "worker.reward.num_cpus", "trainer.plugins", "trainer.logger",
    "trainer.save_checkpoint_path", "algorithm.teacher.template", "algorithm.adv_estimator", "nobody.knows",
]  # fmt: skip


@pytest.mark.parametrize("key", NEEDS_THE_USERS_WORD)
def test_what_names_a_file_a_host_or_a_program_is_not_marked(key: str) -> None:
    assert not may_come_from_record(RunSettings, key)


PURE = {
    "__future__",
    "collections",
    "decimal",
    "re",
    "typing",
    "cepo.answers",
    "cepo.errors",
    "cepo.files",
    "cepo.rewards",
}


@pytest.mark.parametrize("file", LISTED_REWARDS)
def test_listed_rewards_compute_and_do_nothing_else(file: str) -> None:
    """They import what compares answers alone, and open nothing."""
    root = PACKAGE_FOLDER.parent if file.startswith("cepo/") else SHIPPED_FOLDER
    tree = ast.parse((root / file).read_text(encoding="utf-8"))
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            modules.add(".".join(str(node.module).split(".")[:2]))
        elif isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
    assert {name.removesuffix(".abc") for name in modules} <= PURE
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not names & {"open", "eval", "exec", "compile", "__import__", "getattr"}


FOREIGN = cases(__file__, "foreign_settings.yaml")
"""Settings of a stranger's record, of which each alone is refused."""
READ_BY_A_MERGE = {
    "another tokenizer",
    "another model",
    "a model of the hub",
    "an entry of the model",
    "a template elsewhere",
}


@pytest.fixture
def asked() -> Iterator[tuple[str, list[str]]]:
    """A server of a stranger's, and what it was asked."""
    requests: list[str] = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        requests.append(f"{request.path} {request.headers}")
        request.send_error(500)

    with local_server(answer) as address:
        yield address, requests


@pytest.mark.parametrize("command", ["evaluate", "credit", "merge"])
@pytest.mark.parametrize("name", FOREIGN)
def test_a_strangers_record_opens_nothing(
    tmp_path: Path,
    asked: tuple[str, list[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    command: str,
) -> None:
    """No request, no file, and no value of the environment; the message names the setting that the user would repeat."""
    monkeypatch.setenv("CANARY", "s3cret")
    address, requests = asked
    (tmp_path / "secret.txt").write_text("s3cret")
    places = {"HOST": address, "DIR": str(tmp_path), "PACKAGE": str(PACKAGE_FOLDER)}
    settings: list[str] = []
    for setting in FOREIGN[name]:
        for word, place in places.items():
            setting = setting.replace(word, place)
        settings.append(setting)
    step = write_checkpoint(tmp_path / "run", *settings)
    files_before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    arguments: dict[str, list[object]] = {
        "evaluate": [f"checkpoint={step}"],
        "merge": ["--checkpoint", step, "--out", tmp_path / "out"],
        "credit": ["methods=grpo", f"checkpoint={step}"],
    }
    if command == "merge" and name not in READ_BY_A_MERGE:
        assert find_base(step / "actor").path == "microgeo:model"
        return
    if command == "credit" and name == "another validation set":  # it reads none
        assert make_credit_plan(methods="grpo", settings=[], checkpoint=str(step)).config.data.val_files is None
        return
    assert main([command, *map(str, arguments[command])]) == 2
    printed = capsys.readouterr()
    assert any(setting.partition("=")[0] in printed.err for setting in settings)
    assert "give " in printed.err
    assert "s3cret" not in printed.out + printed.err
    assert requests == []
    assert sorted(tmp_path.rglob("*")) == files_before


def test_anchors_and_merged_keys_of_a_record_are_read_alike(tmp_path: Path) -> None:
    """`<<: *x` puts the entries of another mapping into a section, and a key may have dots of its own."""
    step = write_checkpoint(tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    for record in (
        "x: &x {image_dir: /etc}\ndata:\n  <<: *x\n",
        "data: &x {image_dir: /etc}\nworker: *x\n",
        '"data.image_dir": /etc\n',
        "data: {? image_dir : /etc}\n",
        "data: {'image_dir': '/etc'}\n",
    ):
        file.write_text(record, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"data\.image_dir is '/etc'"):
            recorded_for_evaluation(file, ())
    assert step.is_dir()


def test_a_strangers_record_decides_what_is_listed(tmp_path: Path) -> None:
    settings = [
        "data.prompt_key=question", "data.max_response_length=77", "data.max_pixels=4096", "worker.rollout.n=3",
        "worker.rollout.temperature=0.7", "worker.actor.model.lora.rank=8", "algorithm.correct_threshold=0.25",
        "worker.reward.reward_function=/home/alice/cepo/examples/reward_function/dapo.py:compute_score",
        "worker.reward.reward_function_kwargs={max_response_length: 77, overlong_buffer_length: 10}",
    ]  # fmt: skip
    write_checkpoint(tmp_path / "run", *settings)
    config = load_config([], recorded=recorded_for_evaluation(tmp_path / "run" / "config.yaml", ()))
    assert (config.data.prompt_key, config.data.max_response_length, config.data.max_pixels) == ("question", 77, 4096)
    assert (config.worker.rollout.n, config.worker.rollout.temperature) == (3, 0.7)
    assert (config.worker.actor.model.lora.rank, config.algorithm.correct_threshold) == (8, 0.25)
    shipped_reward = SHIPPED_FOLDER / "examples" / "reward_function" / "dapo.py"
    assert config.worker.reward.reward_function == f"{shipped_reward}:compute_score", "the file of this installation"
    assert config.worker.reward.reward_function_kwargs == {"max_response_length": 77, "overlong_buffer_length": 10}


def test_a_file_in_the_working_directory_is_not_a_listed_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stranger's folder has a file of that name, and the user stands in it."""
    shadow = tmp_path / "cepo" / "rewards" / "math.py"
    shadow.parent.mkdir(parents=True)
    shadow.write_text("raise SystemExit('it ran')")
    write_checkpoint(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    config = load_config([], recorded=recorded_for_evaluation(tmp_path / "run" / "config.yaml", ()))
    assert config.worker.reward.reward_function == f"{PACKAGE_FOLDER / 'rewards' / 'math.py'}:compute_score"


def test_a_strangers_prompt_runs_in_a_sandbox(tmp_path: Path) -> None:
    """A template in the run's folder may loop and repeat; it reads no file and calls nothing of Python's."""
    prompt = tmp_path / "run" / "prompt.jinja"
    write_checkpoint(tmp_path / "run", f"data.format_prompt={prompt}")
    prompt.write_text("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ content }}")
    recorded = recorded_for_evaluation(tmp_path / "run" / "config.yaml", ())
    assert recorded.tree["data"]["format_prompt"] == str(prompt)
    for source in (
        "{{ content.__class__.__mro__ }}",
        "{% include '/etc/passwd' %}{{ content }}",
        "{{ content }}{{ cycler.__init__.__globals__.os.system(content) }}",
    ):
        with pytest.raises(ConfigError):
            UserTemplate(source, "it", "content").render(content="x")


def test_each_refused_setting_can_be_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = write_checkpoint(tmp_path / "run", "data.image_hosts=[a.example]", "data.val_files=x/y@test")
    assert dry_run(step)[0] == 2
    assert "give data=..., data.image_hosts=... yourself" in capsys.readouterr().err
    code, text = dry_run(step, "data.image_hosts=[a.example]", "data=microgeo:validation")
    assert (code, "data: microgeo:validation" in text) == (0, True)


def test_a_run_of_the_users_own_keeps_its_record(tmp_path: Path) -> None:
    """Training writes the record and notes it; the same text under another name is theirs too, a changed one is not."""
    settings = ["data.image_hosts=[a.example]", "worker.actor.model.tokenizer_path=org/tokenizer"]
    text = dump_for_record(load_config([BASE, *settings]))
    build_tracker(["file"], RunDescription(folder=tmp_path / "run", config_text=text, max_steps=1)).close()
    file = tmp_path / "run" / "config.yaml"
    assert is_own_record(file)
    config = load_config([], recorded=recorded_for_evaluation(file, ()))
    assert config.data.image_hosts == ["a.example"]
    assert config.worker.actor.model.tokenizer_path == "org/tokenizer"
    moved = file.rename(tmp_path / "config.yaml")
    assert is_own_record(moved)
    moved.write_text(text.replace("a.example", "b.example"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"(?s)was not recorded by a run of yours.*\['b\.example'\]"):
        recorded_for_evaluation(moved, ())


def test_a_note_in_the_run_folder_makes_no_run_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger may copy the whole folder of notes beside another configuration."""
    write_checkpoint(tmp_path / "run", "data.image_hosts=[a.example]", own=True)
    file = tmp_path / "run" / "config.yaml"
    notes = tmp_path / "run" / ".local" / "state" / "cepo" / "own_records"
    notes.mkdir(parents=True)
    for folder in (notes, tmp_path / "run"):
        (folder / file.name).write_bytes(file.read_bytes())
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of_another_user"))
    monkeypatch.chdir(tmp_path / "run")
    assert not is_own_record(file)
    monkeypatch.setenv("XDG_STATE_HOME", ".local/state")  # a relative folder would be that of the stranger
    assert not is_own_record(file)


@pytest.mark.parametrize("form", ["written by others", "a link"])
def test_notes_that_another_user_could_write_are_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, form: str
) -> None:
    """A state folder in a shared place, such as `HOME=/tmp` in a container."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    write_checkpoint(tmp_path / "run", own=True)
    file = tmp_path / "run" / "config.yaml"
    assert is_own_record(file)
    notes = tmp_path / "state" / "cepo" / "own_records"
    if form == "a link":
        notes.rename(tmp_path / "elsewhere")
        notes.symlink_to(tmp_path / "elsewhere")
    else:
        notes.chmod(0o777)
    assert not is_own_record(file)
    remember_own_record("a: 1\n")
    assert "this run is not noted as yours" in caplog.text


def test_a_run_is_trained_where_notes_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").write_text("a file")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    build_tracker(["file"], RunDescription(folder=tmp_path / "run", config_text="a: 1\n", max_steps=1)).close()
    assert "this run is not noted as yours" in caplog.text
    assert not read_record(tmp_path / "run" / "config.yaml", ()).is_own


def test_a_merge_takes_a_model_the_user_names(tmp_path: Path) -> None:
    """By --base alone, or by --config for tokenizer and changed entries of the model's configuration too."""
    settings = ["worker.actor.model.model_path=org/base", "worker.actor.model.override_config={rope: {a.b: 1}}"]
    actor = write_checkpoint(tmp_path / "run", *settings) / "actor"
    file = tmp_path / "run" / "config.yaml"
    with pytest.raises(ConfigError, match=r"model_path=\.\.\. \(cepo merge: --base\)"):
        find_base(actor)
    with pytest.raises(ConfigError, match=r"override_config=\.\.\."):
        find_base(actor, path="org/base")
    base = find_base(actor, config=file)
    assert (base.path, base.override_config) == ("org/base", {"rope": {"a.b": 1}})
    named = {"model_path": "org/base", "tokenizer_path": None, "override_config": {"rope": {"a.b": 1}}}
    assert find_base(actor, named=named).path == "org/base"


def test_an_adapter_of_a_stranger_names_no_model(tmp_path: Path) -> None:
    actor = write_checkpoint(tmp_path / "run") / "actor"
    (tmp_path / "run" / "config.yaml").unlink()
    assert find_base(actor).path == "microgeo:model"
    for name in ("org/base", "/home/alice/private"):
        (actor / "lora_adapter" / "adapter_config.json").write_text(
            json.dumps({"base_model_name_or_path": name, "r": 4})
        )
        with pytest.raises(CheckpointError, match=rf"name it with --base {name}"):
            find_base(actor)
        assert find_base(actor, named={"model_path": name}).path == name
        assert find_base(actor, path=name).path == name
