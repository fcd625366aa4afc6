"""Measures what the driver of a run on many devices does per sampled token, apart from the ranks' own work.

    python -m lab.driver_at_scale
    python -m lab.driver_at_scale --beside OTHER_CHECKOUT --pairs 3

A step of the real trainer runs with `cepo`, two teachers, rewards in worker processes and recorded rollouts, on 8 prompts
with 16 responses of 8,192 tokens each. Only the ranks are absent: their answers are messages as they send them, encoded
beforehand, and the driver's messages to 64 ranks are encoded and dropped. Seconds are processor seconds of the driver's
process, bytes are those of messages, and memory is the growth of the largest resident memory. With `--beside`, each pair is
one process with this checkout and one with the other, and the medians of all pairs are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

PROMPTS = 8
SAMPLES = 16
RANKS = 64
LARGE_RUN = 1_000 * 16 * 8_192
STAGES = ("sample", "plan", "score", "estimate", "check", "update", "record")
REWARD = '''
def compute_score(inputs):
    """Right if the response ends with the truth."""
    scores = []
    for one in inputs:
        right = float(one["response"].rstrip().endswith("{" + one["ground_truth"] + "}"))
        scores.append({"overall": right, "accuracy": right})
    return scores
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8_192, help="tokens per response")
    parser.add_argument("--beside", type=Path, help="another checkout to compare with")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--once", action="store_true", help="measure in this process; used by the others")
    options = parser.parse_args()
    if options.once:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measured_step(Path(folder), options.length)))
        return
    own_checkout = Path(__file__).resolve().parent.parent
    checkouts = [own_checkout]
    if options.beside is not None:
        checkouts.insert(0, options.beside.resolve())
    runs: dict[Path, list[dict[str, float]]] = {checkout: [] for checkout in checkouts}
    for _ in range(options.pairs):
        for checkout in checkouts:
            runs[checkout].append(measured_in(checkout, options.length))
    print_table([medians(runs[checkout]) for checkout in checkouts])


def measured_in(checkout: Path, length: int) -> dict[str, float]:
    """Measures in a process of its own, with the package and the helpers of a checkout."""
    done = subprocess.run(
        [sys.executable, __file__, "--once", "--length", str(length)],
        env={**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"},
        cwd=checkout,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def print_table(columns: Sequence[dict[str, float]]) -> None:
    """Prints a line for each figure, per token, and the seconds of a step of 131 million tokens."""
    for name in columns[0]:
        unit = "ns" if name.endswith("seconds") else "B"
        scale = 1e9 if unit == "ns" else 1.0
        figures = [column[name] for column in columns]
        line = f"{name:22}" + "".join(f"{scale * figure:10.1f} {unit}" for figure in figures)
        if unit == "ns":
            line += "".join(f"{figure * LARGE_RUN:9.1f} s" for figure in figures)
        if len(figures) > 1 and figures[0] > 0:
            line += f"   x {figures[1] / figures[0]:.2f}"
        print(line)


def measured_step(folder: Path, length: int) -> dict[str, float]:
    """Returns processor seconds of each stage, bytes of messages and memory, all per sampled token."""
    from cepo.train import build_trainer

    num_tokens = PROMPTS * SAMPLES * length
    with ExitStack() as stack:
        trainer = build_trainer(scale_config(folder, length), stack)
        ranks = AbsentRanks(trainer, folder, length)
        trainer.backend = ranks
        before = _largest_memory()
        run_step(trainer, 0)  # imports libraries and fills caches
        seconds = run_step(trainer, 1)
        grown = _largest_memory() - before
        received = ranks.received_bytes
        sent = ranks.sent_bytes
        held = held_by_rollouts(trainer)
    result = {f"{stage} seconds": seconds[stage] / num_tokens for stage in STAGES}
    result["all seconds"] = sum(seconds[stage] for stage in STAGES) / num_tokens
    result["a recorded group's seconds"] = seconds["a recorded group"] / (num_tokens / PROMPTS)
    result["received bytes"] = received / num_tokens
    result["sent bytes"] = sent / num_tokens
    result["bytes held of rollouts"] = held / num_tokens
    result["largest memory's bytes"] = grown / num_tokens
    return result


def run_step(trainer: Any, step: int) -> dict[str, float]:
    """Runs a step as `Trainer.train_step` does, and returns the processor seconds of each stage."""
    from cepo.trainer.recording import group_records

    ranks = trainer.backend
    ranks.begin_step()
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(stage: str) -> Iterator[None]:
        ranks.excluded_seconds = 0.0
        begin = time.process_time()
        yield
        seconds[stage] = time.process_time() - begin - ranks.excluded_seconds

    with timed("sample"):
        rollouts = trainer.sample(step)
    with timed("plan"):
        plan = trainer.plan(rollouts)
    num_teachers = sum(bool(view.rows) for view in plan.views)
    assert num_teachers == 2, "both teachers of cepo read references"
    with timed("score"):
        batch = trainer.score(plan)
    with timed("estimate"):
        signal = trainer.estimate(batch)
    with timed("check"):
        trainer.policy.health.may_update(batch, signal)
    with timed("update"):
        updated = trainer.update(batch, signal)
    with timed("record"):
        trainer.record(batch, signal, updated)
    with timed("a recorded group"):
        group_records(batch, signal, trainer.processing, trainer.estimator.views, 1)
    return seconds


def held_by_rollouts(trainer: Any) -> int:
    """Returns the bytes of all that the driver keeps of a step's responses, before it makes tensors of them."""
    trainer.backend.begin_step()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    rollouts = trainer.sample(1)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rollouts.generations
    return after - before


def _largest_memory() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def scale_config(folder: Path, length: int) -> Any:
    """Returns the configuration of a run with a tiny untrained model, which is never asked."""
    from cepo.config import load_config
    from lab.worlds.model import build_untrained_model

    build_untrained_model(folder / "model")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    rows: list[str] = []
    for number in range(PROMPTS):
        rows.append(json.dumps({"prompt": f"problem {number}: " + "what is it? " * 20, "answer": str(number)}))
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return load_config(
        [
            f"data.train_files={folder / 'rows.jsonl'}",
            f"data.rollout_batch_size={PROMPTS}",
            "data.max_prompt_length=1024",
            f"data.max_response_length={length}",
            f"worker.actor.global_batch_size={PROMPTS}",
            f"worker.actor.model.model_path={folder / 'model'}",
            "worker.rollout.name=transformers",
            f"worker.rollout.n={SAMPLES}",
            f"worker.reward.reward_function={folder / 'reward.py'}:compute_score",
            "algorithm.adv_estimator=cepo",
            "trainer.max_steps=2",
            "trainer.val_before_train=false",
            "trainer.logger=[file]",
            "trainer.rollouts_to_log=0",
            f"trainer.save_checkpoint_path={folder / 'run'}",
        ]
    )


class AbsentRanks:
    """Stands for the ranks: hands on their messages from files, and encodes those to them, as the backend under Ray does."""

    def __init__(self, trainer: Any, folder: Path, length: int) -> None:
        from cepo.runtime.dispatch import Sender

        self._folder = folder
        self._senders = [Sender(by_source=True) for _ in range(RANKS)]
        self.excluded_seconds = 0.0
        self._write_answers(trainer.processing, length)
        self.begin_step()

    def begin_step(self) -> None:
        from cepo.runtime.dispatch import Assignment

        self._assignment = Assignment(RANKS, prompts_per_update=PROMPTS)
        self.received_bytes = 0
        self.sent_bytes = 0

    def _write_answers(self, processing: Any, length: int) -> None:
        """Writes the message of each group: random tokens, and half of the answers right."""
        from cepo.runtime.dispatch import encode

        draw = random.Random(0)
        words = processing.encode_text("so the angle at the centre is twice that of the arc, hence it follows that ")
        for prompt in range(PROMPTS):
            group: list[Any] = []
            for sample in range(SAMPLES):
                answer = prompt if sample % 2 == 0 else prompt + 1 + sample
                end = [*processing.encode_text(f" \\boxed{{{answer}}}"), processing.eos_token_ids[0]]
                tokens = [draw.choice(words) for _ in range(length - len(end))] + end
                group.append(_generation(processing, tokens, [-draw.random() for _ in tokens]))
            self._file(prompt).write_bytes(encode(group))

    def _file(self, prompt: int) -> Path:
        return self._folder / f"group_{prompt}"

    @contextmanager
    def _excluded(self) -> Iterator[None]:
        """Leaves out the time of what ranks do."""
        begin = time.process_time()
        yield
        self.excluded_seconds += time.process_time() - begin

    def generate(self, requests: Sequence[Any], settings: Any, on_finished: Any = None) -> list[Any]:
        del settings
        groups: list[Any] = []
        for index in range(len(requests)):
            message = self._file(index).read_bytes()
            self.received_bytes += len(message)
            groups.append(pickle.loads(message))
            if on_finished is not None:
                on_finished(index, groups[index])
        return groups

    def score(self, rows: Sequence[Any], **options: Any) -> list[Any]:
        import torch

        from cepo.runtime.dispatch import encode, in_order, select

        indices = self._assignment.indices_of(rows)
        answers: list[Any] = []
        for sender, part in zip(self._senders, select(rows, indices), strict=True):
            self.sent_bytes += len(sender.encode(((part,), options)))
            with self._excluded():
                message = encode([-torch.rand(len(row.response_ids)) for row in part])
            self.received_bytes += len(message)
            answers.append(pickle.loads(message))
        return in_order(answers, indices)

    def score_initial(self, rows: Sequence[Any], **options: Any) -> list[Any]:
        return self.score(rows, **options)

    def update(self, batches: Sequence[Any], *, step: int) -> dict[str, Any]:
        from cepo.runtime.dispatch import split_batches

        for sender, part in zip(self._senders, split_batches(batches, self._assignment, RANKS), strict=True):
            self.sent_bytes += len(sender.encode(((part,), {"step": step})))
        return {}

    def finish_step(self, step: int) -> None:
        """Ranks update their teachers."""

    def synchronise_rollout(self) -> None:
        """Ranks hand weights to their engines."""

    def forget_work(self) -> None:
        """Ranks free hidden states."""


def _generation(processing: Any, tokens: Sequence[int], log_probs: Sequence[float]) -> Any:
    """Returns a response as a rank sends it: in arrays with its text or, before version 0.5, in tuples without."""
    from dataclasses import replace

    from cepo.rollout.generator import Generation

    if hasattr(Generation, "of"):
        return replace(Generation.of(tokens, log_probs, finished=True), text=processing.decode(tokens))
    fields: dict[str, Any] = {"response_ids": tuple(tokens), "log_probs": tuple(log_probs), "finished": True}
    return Generation(**fields)


if __name__ == "__main__":
    main()
