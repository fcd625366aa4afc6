"""Common mistakes end with exit code 2, in seconds, without a traceback, and with what is wrong and what to do."""

from __future__ import annotations

import base64
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from isolation import own_caches, restored_process

import cepo.train
from cepo.commands.cli import main

pytestmark = pytest.mark.heavy

REPOSITORY = Path(__file__).resolve().parents[2]
BASE = REPOSITORY / "configs" / "microgeo" / "base.yaml"
MISTAKES = {
    "a misspelt command": "trian config=x.yaml",
    "a missing command": "base.yaml",
    "no configuration at all": "train",
    "a missing configuration file": "train config=nowhere.yaml",
    "a misspelt shipped configuration": "train config=microgeo/bse",
    "a misspelt base file": "train config={folder}/based.yaml",
    "invalid YAML": "train config={folder}/broken.yaml",
    "a folder instead of a configuration": "train config={folder}",
    "spaces in a setting": "train config={folder}/good.yaml trainer.max_steps = 3",
    "a colon for the equals sign": "train {run} trainer.max_steps:3",
    "a setting and its value as two words": "train {run} trainer.max_steps 3",
    "a key to be removed": "train {run} ~trainer.max_steps",
    "a list that the shell has split": "train {run} trainer.logger=[console, wandb]",
    "a mapping that the shell has split": "train {run} worker.rollout.val_override_config={n: 2}",
    "braces that the shell has expanded": (
        "train {run} worker.rollout.val_override_config=n:2 worker.rollout.val_override_config=temperature:0"
    ),
    "a mapping without a blank behind its colon": "train {run} worker.rollout.val_override_config={n:2}",
    "help for an unknown section": "help worker.rolout",
    "a report of a missing run folder": "report {folder}/nowhere",
    "a report of a file": "report {folder}/good.jsonl",
    "a report of a folder of runs": "report {folder}",
    "a misspelt run folder": "report {folder}/traned",
    "a comparison in an unknown format": "compare {folder}/trained --out x.docx",
    "model and data in each other's place": "show {folder}/good.jsonl {folder}/sham config={base}",
    "a page where a folder belongs": "show a b config={base} --out show.html",
    "a missing response": "show a b config={base} --response nope",
    "an evaluation without config=": "evaluate",
    "an evaluation of a run folder": "evaluate {folder}/trained",
    "an evaluation of a missing checkpoint": "evaluate checkpoint={folder}/no",
    "a misspelt option": "evaluate chekpoint=x",
    "dashes before an unknown option": "evaluate --m=4",
    "an evaluation on a missing file": "evaluate config={base} data=no/such.parquet",
    "an evaluation on nothing": "evaluate config={base} data.val_files=null",
    "several greedy responses": "evaluate config={base} n=4 temperature=0",
    "no response per problem": "evaluate config={base} n=0",
    "an unknown protocol": "evaluate protocol=papers",
    "an unclear dry run": "evaluate config={base} dry_run=ture",
    "a comparison of folders without records": "compare one two",
    "TRL's name of a setting": "train {run} --num_generations 8",
    "several names of TRL": "train {run} --learning_rate 1e-6 --report_to wandb --save_steps 20",
    "TRL's name inside a section": "train {run} trainer.resume_from_checkpoint=out/checkpoint-5",
    "a whole file of TRL": "train config={folder}/trl.yaml",
    "a name without a counterpart": "train {run} gradient_accumulation_steps=4",
    "ms-swift's name of a setting": "train {run} --freeze_vit true",
    "accelerate's name of a setting": "train {run} --num_processes 8",
    "verl's name of a setting": "train {run} actor_rollout_ref.rollout.n=8",
    "an older EasyR1's name of a setting": "train {run} worker.actor.clip_ratio=0.2",
    "an older EasyR1's reward type": "train {run} worker.reward.reward_type=sequential",
    "a misspelt key": "train {run} data.rollout_batchsize=4",
    "a key without its section": "train {run} rollout_batch_size=4",
    "a word instead of a number": "train {run} worker.rollout.n=four",
    "a value out of range": "train {run} worker.rollout.temperature=0",
    "an unknown method": "train {run} algorithm.adv_estimator=gpro",
    "a method in capitals": "train {run} algorithm.adv_estimator=GRPO",
    "one logger without brackets": "train {run} trainer.logger=console",
    "one response per prompt": "train {run} worker.rollout.n=1",
    "batch sizes that do not divide": "train {run} worker.actor.global_batch_size=3",
    "several faults between settings": (
        "train {run} worker.actor.global_batch_size=3 algorithm.adv_estimator=gae worker.critic.global_batch_size=8 "
        "data.override_chat_template={folder}/chat.jinja"
    ),
    "a misspelt tracker": "train {run} trainer.logger=[wandbb]",
    "a missing checkpoint folder": "train {run} trainer.load_checkpoint_path={folder}/no",
    "a run folder as its checkpoint": "train {run} trainer.load_checkpoint_path={folder}/trained",
    "too long responses": "train {run} data.max_response_length=1000000",
    "a misspelt data file": "train {run} data.train_files={folder}/god.jsonl",
    "a data set by its address": "train {run} data.train_files=https://huggingface.co/datasets/org/problems",
    "a missing data file": "train {run} data.train_files={folder}/nowhere.parquet",
    "an empty file": "train {run} data.train_files={folder}/empty.jsonl",
    "a file without rows": "train {run} data.train_files={folder}/head.csv",
    "a truncated file": "train {run} data.train_files={folder}/cut.parquet",
    "a wrong question column": "train {run} data.prompt_key=question",
    "a wrong answer column": "train {run} data.answer_key=label",
    "a wrong image column": "train {run} data.image_key=pictures",
    "a missing image file": "train {run} data.train_files={folder}/absent.jsonl",
    "an image by its address": "train {run} data.train_files={folder}/address.jsonl",
    "a damaged image in base64": "train {run} data.train_files={folder}/base64.jsonl",
    "an image without its placeholder": "train {run} data.train_files={folder}/mark.jsonl",
    "a row without an answer": "train {run} data.train_files={folder}/answer.jsonl",
    "prompts longer than the limit": "train {run} data.max_prompt_length=9 data.min_pixels=16384",
    "fewer rows than a batch": "train {run} data.rollout_batch_size=10 worker.actor.global_batch_size=5",
    "a template without its variable": "train {run} data.format_prompt={folder}/question.jinja",
    "a model without its organisation": "train {run} worker.actor.model.model_path=Qwen2.5-VL-3B-Instruct",
    "a model by its address": "train {run} worker.actor.model.model_path=https://huggingface.co/org/model/tree/main",
    "a missing model folder": "train {run} worker.actor.model.model_path=./nowhere",
    "a model folder without a model": "train {run} worker.actor.model.model_path={folder}",
    "a model folder without weights": "train {run} worker.actor.model.model_path={folder}/sham",
    "a checkpoint as the model": "train {run} worker.actor.model.model_path={folder}/trained/global_step_20",
    "an adapter as the model": "train {run} worker.actor.model.model_path={folder}/adapter",
    "a hub model without a network": "train {run} worker.actor.model.model_path=org/model",
    "hub data without a network": "train {run} data.train_files=org/problems@train",
    "a misspelt adapter target": "train {run} worker.actor.model.lora.rank=4 worker.actor.model.lora.target_modules=q_proj,v_prj",
    "more GPUs than the machine has": "train {run} trainer.n_gpus_per_node=512 worker.rollout.n=256",
    "several machines without a cluster": "train {run} trainer.nnodes=2",
    "a run folder below a file": "train {run} trainer.save_checkpoint_path={folder}/good.jsonl/run",
    "a Ray cluster that does not answer": "train {run} trainer.n_gpus_per_node=2 trainer.ray_address=127.0.0.1:9",
    "a missing reward file": "train {run} worker.reward.reward_function={folder}/nowhere.py:score",
    "a misspelt reward file": "train {run} worker.reward.reward_function={folder}/rewrd.py:score",
    "a reward named as in Python": "train {run} worker.reward.reward_function=my_reward.score",
    "a misspelt reward function": "train {run} worker.reward.reward_function={folder}/reward.py:scores",
    "a missing library of the reward": "train {run} worker.reward.reward_function={folder}/ruler.py:score",
    "a reward file with a syntax error": "train {run} worker.reward.reward_function={folder}/unclosed.py:score",
    "a reward file that raises": "train {run} worker.reward.reward_function={folder}/shelf.py:score",
    "a plug-in without a method": "train {run} trainer.plugins=[{folder}/plugin.py] algorithm.adv_estimator=mine",
    "a misspelt plug-in file": "train {run} trainer.plugins=[{folder}/metod.py]",
    "a method without its signal": "train {run} trainer.plugins=[{folder}/lacking.py]",
    "a method without its name": "train {run} trainer.plugins=[{folder}/nameless.py]",
    "a loss without its name": "train {run} trainer.plugins=[{folder}/nameless_loss.py]",
    "a function registered as a loss": "train {run} trainer.plugins=[{folder}/function.py]",
    "a misspelt reward keyword": (
        "train {run} worker.reward.reward_function={folder}/reward.py:score "
        'worker.reward.reward_function_kwargs={"weigth":1}'
    ),
    "a reward of one sample": "train {run} worker.reward.reward_function={folder}/reward.py:single",
    "a reward of TRL's form": "train {run} worker.reward.reward_function={folder}/reward.py:trls",
    "a reward of verl's form": "train {run} worker.reward.reward_function={folder}/reward.py:verls",
    "a reward that returns a number": "train {run} worker.reward.reward_function={folder}/reward.py:number",
    "a reward without overall": "train {run} worker.reward.reward_function={folder}/reward.py:without",
    "a wrong number of scores": "train {run} worker.reward.reward_function={folder}/reward.py:twice",
    "a reward that always raises": "train {run} worker.reward.reward_function={folder}/reward.py:raises",
    "a reward that always hangs": (
        "train {run} worker.reward.reward_function={folder}/reward.py:hangs worker.reward.timeout_seconds=0.5 "
        "worker.reward.num_cpus=2 data.rollout_batch_size=2 worker.rollout.n=2"
    ),
    "a method that returns a tensor": "train {run} trainer.plugins=[{folder}/bare.py] algorithm.adv_estimator=bare",
    "a method of one's own that raises": "train {run} trainer.plugins=[{folder}/method.py] algorithm.adv_estimator=faulty",
    "an accuracy in percents": "train {run} worker.reward.reward_function={folder}/reward.py:percents",
}  # fmt: skip
"""What is typed behind `cepo`. Braces name the arguments of a run that is right, and files; messages: lab/notes/mistakes.md."""
WITHOUT_NETWORK = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
ONLY_WARNED_OF = ("an accuracy in percents",)
"""Mistakes that may be meant; the run ends well."""
SHOWN_AT_WORK = (
    *ONLY_WARNED_OF,
    "a reward that always hangs",
    "a reward that always raises",
    "a method that returns a tensor",
    "a method of one's own that raises",
)

_REWARDS = """\
def score(samples, weight=1.0):
    return [{"overall": weight * (len(sample["response"]) % 2)} for sample in samples]

def number(samples):
    return [1.0 for _ in samples]

def without(samples):
    return [{"accuracy": 1.0} for _ in samples]

def twice(samples):
    return [{"overall": 1.0} for _ in samples] * 2

def single(sample):
    return {"overall": float(sample["response"] == sample["ground_truth"])}

def trls(prompts, completions, **kwargs):
    return [0.0 for _ in completions]

def verls(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0

def raises(samples): return [{"overall": sample["label"]} for sample in samples]

def hangs(samples):
    while True:
        pass

def percents(samples):
    return [{"overall": 0.0, "accuracy": 85.0} for _ in samples]
"""

_METHOD = """\
from cepo.algorithms import Estimator, register_estimator

@register_estimator("faulty")
class Faulty(Estimator):
    views = ()

    def signal(self, batch, *, step):
        return {}["answers"]
"""

_BARE_METHOD = """\
from cepo.algorithms import Estimator, register_estimator

@register_estimator("bare")
class Bare(Estimator):
    views = ()

    def signal(self, batch, *, step):
        return batch.response_mask.float()
"""

_LACKING_METHOD = """\
from cepo.algorithms import Estimator, register_estimator

@register_estimator("lacking")
class Lacking(Estimator):
    views = ()
"""

_NAMELESS_METHOD = """\
from cepo.algorithms import Estimator, register_estimator

@register_estimator
class MyMethod(Estimator):
    def signal(self, batch, *, step):
        raise NotImplementedError
"""

_NAMELESS_LOSS = """\
from cepo.losses import PolicyLoss, register_loss

@register_loss
class Squared(PolicyLoss):
    pass
"""

_LOSS_FUNCTION = """\
from cepo.losses import register_loss

@register_loss("squared")
def squared(tokens):
    return tokens.ratio**2
"""

_TRL = "model_name_or_path: org/model\nlearning_rate: 1.0e-6\nnum_generations: 8\nbf16: true\n"


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
        "bare.py": _BARE_METHOD,
        "lacking.py": _LACKING_METHOD,
        "nameless.py": _NAMELESS_METHOD,
        "nameless_loss.py": _NAMELESS_LOSS,
        "function.py": _LOSS_FUNCTION,
        "trl.yaml": _TRL,
        "based.yaml": "base: microgeo/bse\n",
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
    """Each mistake's message as lab/notes/mistakes.md has it."""
    page = (REPOSITORY / "lab" / "notes" / "mistakes.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (.+?) \| (.+) \|$", page.partition("| --- |")[2], flags=re.MULTILINE))
    assert list(rows) == list(MISTAKES)
    return rows


def typed(name: str, run: list[str], folder: Path) -> list[str]:
    text = MISTAKES[name].replace("{folder}", str(folder)).replace("{base}", str(BASE))
    words: list[str] = []
    for word in text.split():
        words += run if word == "{run}" else [word]
    return words


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_soon_with_the_message_on_the_page(
    name: str,
    run: list[str],
    world: Path,
    messages: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def no_model(*_: object) -> None:
        raise AssertionError("a model was about to be loaded")

    if name not in SHOWN_AT_WORK:
        monkeypatch.setattr(cepo.train, "build_backend", no_model)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for key, value in (WITHOUT_NETWORK if "without a network" in name else {"HF_HUB_OFFLINE": "1"}).items():
        monkeypatch.setenv(key, value)
    monkeypatch.chdir(world)
    start = time.process_time()
    with restored_process():
        code = main(typed(name, run, world))
    assert time.process_time() - start < 30
    assert code == (0 if name in ONLY_WARNED_OF else 2)
    output = "".join([*capsys.readouterr(), caplog.text])
    assert "Traceback" not in output
    for part, shown in ((world, "DIR"), (sys.executable, "python"), (REPOSITORY, "cepo"), ("<", "&lt;"), ("|", "\\|")):
        output = output.replace(str(part), shown)
    printed = " ".join(output.split())
    assert [part for part in messages[name].split("...") if part.strip() not in printed] == [], printed
    if name not in SHOWN_AT_WORK:
        assert not [each for each in ("run", "evaluations") if (world / each).exists()]
