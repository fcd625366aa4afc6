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
import yaml
from isolation import own_caches, restored_process

import cepo.train
from cepo.commands.cli import main

pytestmark = pytest.mark.heavy

REPOSITORY = Path(__file__).resolve().parents[2]
BASE = REPOSITORY / "configs" / "microgeo" / "base.yaml"
MISTAKES: dict[str, str] = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text(encoding="utf-8"))
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

_NARROW_METHOD = """\
from cepo.algorithms import GroupRelativeEstimator, register_estimator

@register_estimator("narrow")
class Narrow(GroupRelativeEstimator):
    def signal(self, batch):
        raise NotImplementedError
"""

_OPEN_METHOD = """\
from cepo.algorithms import GroupRelativeEstimator, register_estimator

@register_estimator("open")
class Open(GroupRelativeEstimator):
    class Config:
        radius = 0.3

    def signal(self, batch, *, step):
        raise NotImplementedError
"""

_BUILT_METHOD = """\
from cepo.algorithms import GroupRelativeEstimator, register_estimator

@register_estimator("built")
class Built(GroupRelativeEstimator):
    def __init__(self, radius=0.2):
        self.radius = radius

    def signal(self, batch, *, step):
        raise NotImplementedError
"""

_WEIGHTLESS_METHOD = """\
from cepo.algorithms import AdvantageConfig, WeightedEstimator, register_estimator

@register_estimator("weightless")
class Weightless(WeightedEstimator):
    class Config:
        advantage: AdvantageConfig = AdvantageConfig()

    def evidence(self, batch):
        raise NotImplementedError
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
    faulty |= {"bare": {"images": ["good"]}, "windows": {"images": ["photos\\good.png"]}, "sheet": {"answer": "#REF!"}}
    faulty |= {
        "foreign": {"problem": "<img>Find x."},
        "pair": {"problem": "<image><image>Same?", "images": "a.png;b.png"},
    }
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
        "columns.json": json.dumps({"images": {"0": ["good.png"], "1": ["good.png"]}, "answer": {"0": "3", "1": "4"}}),
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
        "narrow.py": _NARROW_METHOD,
        "open.py": _OPEN_METHOD,
        "built.py": _BUILT_METHOD,
        "weightless.py": _WEIGHTLESS_METHOD,
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
    for part, page_form in (
        (world, "DIR"),
        (sys.executable, "python"),
        (REPOSITORY, "cepo"),
        ("<", "&lt;"),
        ("|", "\\|"),
    ):
        output = output.replace(str(part), page_form)
    printed = " ".join(output.split())
    for part in messages[name].split("..."):
        assert part.strip() in printed
    if name not in SHOWN_AT_WORK:
        assert not [folder_name for folder_name in ("run", "evaluations") if (world / folder_name).exists()]
