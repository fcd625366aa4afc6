"""Common mistakes: what is typed, how it ends, and what the message must name. `python3 tests/commands/mistakes.py` measures
each as a command of its own and writes docs/mistakes.md."""

from __future__ import annotations

import base64
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BASE = REPOSITORY / "configs" / "microgeo" / "base.yaml"
PAGE = REPOSITORY / "docs" / "mistakes.md"


@dataclass(frozen=True)
class Mistake:
    """One common mistake. For `train`, `typed` comes behind a run that is right. Braces name files of the world."""

    name: str
    typed: Sequence[str]
    parts: Sequence[str]  # what the message has to hold
    alone: bool = False  # nothing stands before `typed`
    variables: Mapping[str, str] = field(default_factory=dict)  # of the environment
    loads_model: bool = False  # the mistake cannot show before a model is at work
    limit_seconds: float = 30.0  # of CPU time, for the command as a whole
    code: int = 2

    def faults(self, code: int, output: str, seconds: float, folder: Path) -> list[object]:
        """What is wrong with how the command ended."""
        found: list[object] = [part for part in self.parts if part.replace("{folder}", str(folder)) not in output]
        found += ["Traceback"] if "Traceback" in output else []
        found += [code] if code != self.code else []
        return found + ([seconds] if seconds > self.limit_seconds else [])

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
        "reward.py\", line 13, in raises", loads_model=True, limit_seconds=60,
    ),
    _typed(
        "a method of one's own that raises", "trainer.plugins=[{folder}/method.py] algorithm.adv_estimator=faulty",
        "method.py, line 8, in signal: KeyError: 'answers'", loads_model=True, limit_seconds=60,
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


def run_as_command(mistake: Mistake, run: Sequence[str], folder: Path) -> tuple[int, str, float]:
    """Exit code, messages and seconds of CPU time of the mistake as a command of its own."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": str(folder), **mistake.variables}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [sys.executable, "-m", "cepo", *mistake.words(run, folder)]
    done = subprocess.run(
        words, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.returncode, done.stdout + done.stderr, seconds


def message_of(output: str) -> str:
    """The line that names the mistake: the last error of the log, else the first line."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line.partition(" ERROR cepo.train: ")[2] for line in lines if " ERROR cepo.train: " in line]
    return (errors or lines or [""])[0]


def page(results: Mapping[str, tuple[int, str, float]], folder: Path, model: Path) -> str:
    """docs/mistakes.md."""
    lines = [
        "# Common mistakes",
        "",
        "The table lists common mistakes, the time each takes to fail, and its message. None ends with a",
        "traceback, and all but the last two fail before a model is loaded; `tests/commands/test_mistakes.py`",
        "checks this. `python3 tests/commands/mistakes.py` runs each mistake as a separate command and writes",
        "this page. Seconds are CPU time, which equals the elapsed time on an idle machine. Most of the",
        "longer ones are spent importing torch and transformers.",
        "",
        "| mistake | exit code | CPU seconds | message (beginning) |",
        "| --- | --- | --- | --- |",
    ]
    for mistake in MISTAKES:
        code, output, seconds = results[mistake.name]
        words = message_of(output).replace(str(folder), "DIR").replace(str(model), "MODEL")
        words = words.replace(sys.executable, "python").replace(str(REPOSITORY), "cepo").replace("|", "\\|")
        shown = re.sub(r"\s+", " ", words)
        shown = shown if len(shown) <= 240 else f"{shown[:237]}..."
        lines.append(f"| {mistake.name} | {code} | {seconds:.1f} | {shown.replace('<', '&lt;')} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures every mistake and writes the page."""
    import tempfile

    from lab.worlds.model import build_untrained_model

    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name) / "world", Path(name) / "model"
        folder.mkdir()
        build_untrained_model(model, seed=0)
        run = build_world(folder, model)
        results = {}
        for mistake in MISTAKES:
            code, output, seconds = results[mistake.name] = run_as_command(mistake, run, folder)
            faults = mistake.faults(code, output, seconds, folder)
            sys.stderr.write(
                f"{mistake.name}: {code}, {seconds:.1f} s{f' BAD {faults} {output[-1500:]}' if faults else ''}\n"
            )
        PAGE.write_text(page(results, folder, model), encoding="utf-8")


if __name__ == "__main__":
    main()
