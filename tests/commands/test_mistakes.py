"""Common mistakes end with exit code 2, in seconds, without a traceback, and with what is wrong and what to do."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import huggingface_hub.constants
import pytest
from isolation import own_caches, restored_process

import cepo.train
from cepo.cli import main

pytestmark = pytest.mark.heavy

REPOSITORY = Path(__file__).resolve().parents[2]
BASE = REPOSITORY / "configs" / "microgeo" / "base.yaml"
AS_COMMANDS = (
    "a YAML file without config=",
    "a missing library of the reward",
    pytest.param("a wrong image column", marks=pytest.mark.nightly("imports torch in a process of its own")),
)


@dataclass(frozen=True)
class Mistake:
    """One common mistake. For `train`, `typed` comes behind a run that is right. Braces name files of the world."""

    name: str
    typed: Sequence[str]
    parts: Sequence[str]  # what the message has to hold
    alone: bool = False  # nothing stands before `typed`
    variables: Mapping[str, str] = field(default_factory=dict)  # of the environment
    loads_model: bool = False  # the mistake cannot show before a model is at work

    def require(self, code: int, output: str, folder: Path) -> None:
        """How the command ended is what it should be."""
        assert [part for part in self.parts if part.replace("{folder}", str(folder)) not in output] == [], output
        assert "Traceback" not in output
        assert code == 2, output

    def words(self, run: Sequence[str], folder: Path) -> list[str]:
        """The words behind `cepo`."""
        typed = [word.replace("{folder}", str(folder)).replace("{base}", f"{BASE}") for word in self.typed]
        return typed if self.alone else ["train", *run, *typed]


def _typed(name: str, line: str, *parts: str, **further: object) -> Mistake:
    return Mistake(name, line.split(), parts, **further)  # type: ignore[arg-type]


def _alone(name: str, line: str, *parts: str, **further: object) -> Mistake:
    return _typed(name, line, *parts, alone=True, **further)


def _data(name: str, file: str, *parts: str) -> Mistake:
    return _typed(name, f"data.train_files={{folder}}/{file}", file, *parts)


def _reward(name: str, function: str, *parts: str, **further: object) -> Mistake:
    return _typed(name, f"worker.reward.reward_function={{folder}}/{function}", *parts, **further)


MISTAKES = (
    _alone("a misspelt command", "trian config=x.yaml", "'trian'", "Did you mean 'train'?"),
    _alone("a missing command", "base.yaml", "base.yaml", "cepo train config=base.yaml"),
    _alone("a YAML file without config=", "train {folder}/good.yaml", "config={folder}/good.yaml"),
    _alone("no configuration at all", "train", "nothing is configured", "config=FILE"),
    _alone("EasyR1's key with dashes", "train --trainer.max_steps=3", "without the leading dashes"),
    _alone("a missing configuration file", "train config=nowhere.yaml", "nowhere.yaml", "there is no such file"),
    _alone("invalid YAML", "train config={folder}/broken.yaml", "broken.yaml, line", "not valid YAML"),
    _alone("a folder instead of a configuration", "train config={folder}", "is a folder", "broken.yaml, good.yaml"),
    _alone("spaces in a setting", "train config={folder}/good.yaml trainer.max_steps = 3", "without spaces: trainer.max_steps=3"),
    _alone("help for an unknown section", "help worker.rolout", "Did you mean 'worker.rollout'?"),
    _alone("completion for an unknown shell", "completion bsh", "is not one of 'bash', 'zsh', 'fish'"),
    _alone("a report of a missing run folder", "report {folder}/nowhere", "nowhere"),
    _alone("a report of a file", "report {folder}/trained/metrics.jsonl", "is a file", "give the run folder, {folder}/trained"),
    _alone("a comparison in an unknown format", "compare {folder}/trained --out x.docx", "--out x.docx", ".html, .png"),
    _alone("model and data in each other's place", "show {folder}/good.jsonl {folder}/sham config={base}", "MODEL comes first"),
    _alone("a page where a folder belongs", "show a b config={base} --out show.html", "--out show.html: give a folder"),
    _alone("a missing response", "show a b config={base} --response nope", "--response=nope: there is no such file"),
    _alone("an evaluation without config=", "evaluate", "config=FILE"),
    _alone("an evaluation of a missing checkpoint", "evaluate checkpoint={folder}/no", "there is no such folder", "global_step_"),
    _typed("TRL's name of a setting", "--num_generations 8", "'--num_generations'", "without the leading dashes"),
    _typed("verl's name of a setting", "actor_rollout_ref.rollout.n=8", "here it is worker.rollout.n"),
    _typed(
        "an older EasyR1's reward type", "worker.reward.reward_type=sequential", "worker.reward.reward_type=sequential",
        'Write REWARD_TYPE = "sequential"',
    ),
    _typed("a misspelt key", "data.rollout_batchsize=4", "data.rollout_batchsize", "Did you mean 'rollout_batch_size'?"),
    _typed("a key without its section", "rollout_batch_size=4", "data.rollout_batch_size"),
    _typed("a word instead of a number", "worker.rollout.n=four", "worker.rollout.n", "'four'", "an integer"),
    _typed("a value out of range", "worker.rollout.temperature=0", "worker.rollout.temperature", "above 0"),
    _typed("an unknown method", "algorithm.adv_estimator=gpo", "'gpo'", "Did you mean 'grpo'?"),
    _typed("one response per prompt", "worker.rollout.n=1", "worker.rollout.n=1", "at least 2"),
    _typed("batch sizes that do not divide", "worker.actor.global_batch_size=3", "global_batch_size=3", "1, 2, 4"),
    _typed("a misspelt tracker", "trainer.logger=[wandbb]", "'wandbb'", "Did you mean 'wandb'?"),
    _typed("a missing checkpoint folder", "trainer.load_checkpoint_path={folder}/no", "load_checkpoint_path", "no such"),
    _typed(
        "a run folder as its checkpoint", "trainer.load_checkpoint_path={folder}/trained", "{folder}/trained is not",
        "its last one is {folder}/trained/global_step_20",
    ),
    _typed("too long responses", "data.max_response_length=1000000", "has positions for", "data.max_response_length to at most"),
    _data("a missing data file", "nowhere.parquet", "there is no such file or folder"),
    _data("an empty file", "empty.jsonl", "empty.jsonl is empty (0 bytes)"),
    _data("a file without rows", "head.csv", "have no rows"),
    _data("a truncated file", "cut.parquet", "cannot be read"),
    _typed("a wrong question column", "data.prompt_key=question", "data.prompt_key", "'question'", "images, problem"),
    _typed("a wrong answer column", "data.answer_key=label", "data.answer_key", "'label'", "images, problem, answer"),
    _typed("a wrong image column", "data.image_key=pictures", "data.image_key", "'pictures'", "images, problem"),
    _data("a missing image file", "absent.jsonl", "row 1", "absent.png", "data.skip_bad_rows=true"),
    _data("an image by its address", "address.jsonl", "row 1", "https://example.org/a.png", "Name example.org there"),
    _data("a damaged image in base64", "base64.jsonl", "row 1", "is not valid base64", "encode the file again"),
    _data("an image without its placeholder", "mark.jsonl", "row 1", "0 '<image>' in the text but 1 images"),
    _data("a row without an answer", "answer.jsonl", "row 1", "'answer' is empty", "data.skip_bad_rows=true"),
    _typed(
        "prompts longer than the limit", "data.max_prompt_length=9 data.min_pixels=16384", "all of its 8 prompts",
        "data.max_prompt_length=9. Raise it to", "data.min_pixels=16384 are enlarged",
    ),
    _typed(
        "fewer rows than a batch", "data.rollout_batch_size=10 worker.actor.global_batch_size=5",
        "data.rollout_batch_size is 10", "8 usable problems",
    ),
    _typed("a template without its variable", "data.format_prompt={folder}/question.jinja", "question", "accepted: content"),
    _typed("a missing model folder", "worker.actor.model.model_path=./nowhere", "./nowhere", "org/name"),
    _typed("a model folder without a model", "worker.actor.model.model_path={folder}", "model_path={folder}", "checkpoint"),
    _typed("a model folder without weights", "worker.actor.model.model_path={folder}/sham", "{folder}/sham", "no weights"),
    _typed(
        "a checkpoint as the model", "worker.actor.model.model_path={folder}/trained/global_step_20", "is a checkpoint",
        "cepo merge --checkpoint {folder}/trained/global_step_20", "trainer.load_checkpoint_path={folder}/trained/global_step_20",
    ),
    _typed("an adapter as the model", "worker.actor.model.model_path={folder}/adapter", "merge --checkpoint {folder}/adapter"),
    _typed(
        "a hub model without a network", "worker.actor.model.model_path=org/model", "org/model", "cannot be reached",
        "Give a local folder", variables={"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"},
    ),
    _typed(
        "hub data without a network", "data.train_files=org/problems@train", "org/problems", "cannot be reached",
        "Give a local folder", variables={"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"},
    ),
    _typed(
        "a misspelt adapter target", "worker.actor.model.lora.rank=4 worker.actor.model.lora.target_modules=q_proj,v_prj",
        "'v_prj' fits no layer", "Did you mean 'v_proj'?",
    ),
    _typed(
        "more GPUs than the machine has", "trainer.n_gpus_per_node=512 worker.rollout.n=256", "trainer.n_gpus_per_node=512",
        "Set it to",
    ),
    _typed(
        "a Ray cluster that does not answer", "trainer.n_gpus_per_node=2 trainer.ray_address=127.0.0.1:9", "127.0.0.1:9",
        "ray start --head",
    ),
    _reward("a missing reward file", "nowhere.py:score", "nowhere.py"),
    _reward("a misspelt reward function", "reward.py:scores", "no function 'scores'", "Did you mean 'score'?"),
    _reward("a missing library of the reward", "ruler.py:score", "No module named 'mathruler'", "pip install mathruler"),
    _reward("a reward file with a syntax error", "unclosed.py:score", "unclosed.py, line 1", "SyntaxError"),
    _reward("a reward file that raises", "shelf.py:score", "shelf.py, line 3, in table fails when it is loaded: KeyError"),
    _typed(
        "a plug-in without a method", "trainer.plugins=[{folder}/plugin.py] algorithm.adv_estimator=mine", "registers no",
        "@register_estimator", "'mine'",
    ),
    _reward("a misspelt reward keyword", "reward.py:score worker.reward.reward_function_kwargs={weigth:1}", "weigth", "weight"),
    _reward("a reward that returns a number", "reward.py:number", "a float: 1.0", "{'overall': 1.0}"),
    _reward("a reward without overall", "reward.py:without", "without 'overall'", "Add the key"),
    _reward("a wrong number of scores", "reward.py:twice", "returned 2 scores for 1 samples", "one per sample"),
    _reward(
        "a reward that always raises", "reward.py:raises", "failed for each of the first 16 responses", "KeyError: 'label'",
        "reward.py\", line 13, in raises", loads_model=True,
    ),
    _typed(
        "a method of one's own that raises", "trainer.plugins=[{folder}/method.py] algorithm.adv_estimator=faulty",
        "method.py, line 8, in signal: KeyError: 'answers'", loads_model=True,
    ),
)  # fmt: skip

_REWARDS = """\
def score(samples, weight=1.0):
    return [{"overall": weight * (len(sample["response"]) % 2)} for sample in samples]

def number(samples):
    return [1.0 for _ in samples]

def without(samples):
    return [{"accuracy": 1.0} for _ in samples]

def twice(samples):
    return [{"overall": 1.0} for _ in samples] * 2

def raises(samples): return [{"overall": sample["label"]} for sample in samples]
"""

_METHOD = """\
from cepo.algorithms import Estimator, register_estimator

@register_estimator("faulty")
class Faulty(Estimator):
    views = ()

    def signal(self, batch, *, step):
        return {}["answers"]
"""


def build_world(folder: Path, model: Path) -> list[str]:
    """Files with mistakes in `folder`, and the arguments of a run that is right."""
    from PIL import Image

    Image.new("RGB", (64, 64), (200, 30, 30)).save(folder / "good.png")
    good = {"images": ["good.png"], "problem": "<image>Find x.", "answer": "4"}
    faulty = {"absent": {"images": ["absent.png"]}, "mark": {"problem": "Find x."}, "answer": {"answer": " "}}
    text = base64.b64encode((folder / "good.png").read_bytes()).decode()
    faulty |= {"address": {"images": ["https://example.org/a.png"]}, "base64": {"images": [text[:-8] + "*"]}}
    rows = {"good": [good] * 8} | {name: [good, good | change, good, good] for name, change in faulty.items()}
    for name, values in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in values))
    texts = {
        "good.yaml": "data:\n  train_files: x\n",
        "broken.yaml": "data:\n  train_files: [x\n",
        "empty.jsonl": "",
        "head.csv": "images,problem,answer\n",
        "cut.parquet": "PAR1 and nothing more",
        "question.jinja": "{{ question }}",
        "reward.py": _REWARDS,
        "ruler.py": "from mathruler.grader import grade_answer\n",
        "unclosed.py": "def score(samples:\n",
        "shelf.py": "values = {}\ndef table():\n    return values['weights']\ntable()\n",
        "plugin.py": "",
        "method.py": _METHOD,
        "sham/config.json": "{}",
        "adapter/adapter_config.json": "{}",
        "trained/metrics.jsonl": "",
        "trained/global_step_20/trainer_state.json": "{}",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return [
        "config=configs/microgeo/base.yaml",
        f"data.train_files={folder}/good.jsonl",
        f"data.image_dir={folder}",
        "data.val_files=null",
        "data.max_response_length=8",
        "data.rollout_batch_size=4",
        f"worker.actor.model.model_path={model}",
        "worker.actor.global_batch_size=2",
        "worker.rollout.name=transformers",
        "worker.rollout.n=4",
        f"worker.reward.reward_function={folder}/reward.py:score",
        "trainer.val_before_train=false",
        "trainer.logger=[file]",
        "trainer.max_steps=1",
        f"trainer.save_checkpoint_path={folder}/run",
    ]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mistakes")


@pytest.fixture(scope="module")
def run(world: Path, tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The arguments of a run that is right."""
    with own_caches(tmp_path_factory.mktemp("caches")):
        yield build_world(world, tiny_model_folder)


@pytest.fixture(scope="module")
def messages() -> dict[str, str]:
    """The beginning of each mistake's message as docs/mistakes.md has it."""
    page = (REPOSITORY / "docs" / "mistakes.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (.+?) \| (.+) \|$", page.partition("| --- |")[2], flags=re.MULTILINE))
    assert list(rows) == [mistake.name for mistake in MISTAKES]
    return rows


def as_on_the_page(text: str, folder: Path, model: str) -> str:
    names = {str(folder): "DIR", model: "MODEL", sys.executable: "python", str(REPOSITORY): "cepo", "<": "&lt;"}
    for part, name in names.items():
        text = text.replace(part, name)
    return " ".join(text.replace("|", "\\|").split())


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.name for mistake in MISTAKES])
def test_a_mistake_ends_soon_with_the_remedy_on_the_page(
    mistake: Mistake,
    run: list[str],
    world: Path,
    messages: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def no_model(*_: object) -> None:
        raise AssertionError("a model was about to be loaded")

    if not mistake.loads_model:
        monkeypatch.setattr(cepo.train, "build_backend", no_model)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name, value in {"HF_HUB_OFFLINE": "1", **mistake.variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(world)
    start = time.process_time()
    with restored_process():
        code = main(mistake.words(run, world))
    assert time.process_time() - start < 30
    shown = capsys.readouterr()
    output = shown.out + shown.err + caplog.text
    mistake.require(code, output, world)
    (model,) = (word.partition("=")[2] for word in run if "model_path" in word)
    assert messages[mistake.name].removesuffix("...").strip() in as_on_the_page(output, world, model)
    if not mistake.loads_model:
        assert not (world / "run").exists()


@pytest.mark.parametrize("name", AS_COMMANDS)
def test_some_mistakes_as_commands_of_their_own_end_alike(name: str, run: list[str], world: Path) -> None:
    (mistake,) = [each for each in MISTAKES if each.name == name]
    words = [sys.executable, "-m", "cepo", *mistake.words(run, world)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": str(world)}
    done = subprocess.run(
        words, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    mistake.require(done.returncode, done.stdout + done.stderr, world)
