"""Trains the real-model example in TRL, with cepo's credit and with TRL's own, and compares cepo's advantages.

    python3 -m lab.real_model_in_trl --model FOLDER --threads 2

`CepoTrainer` and TRL's GRPOTrainer train the model on the problems and with the settings of
`configs/real_model/base.yaml`, one after the other, from the same weights and seed. At each of `CepoTrainer`'s first
steps, cepo's own trainer gets its adapter and its responses and computes their advantages, from contexts that it
builds itself; the command fails if any differs by more than `BOUND`. cepo's validator measures the held-out accuracy of
both. A finished training is remembered in `--runs` and not repeated; its records go to `lab/results/`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model_state_dict
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from cepo.config import RunConfig, check_config, load_config
from cepo.data.prompts import Problem
from cepo.integrations.trl import CepoTrainer
from cepo.metrics import results
from cepo.rewards.contract import load_reward
from cepo.rollout.generator import Generation, GenerationRequest, OnFinished, SamplingSettings
from cepo.train import build_trainer
from cepo.trainer.loop import Trainer
from cepo.workers.worker import Worker
from lab.support.machine import load_average, machine_record
from lab.support.tables import RESULTS, save, table

BOUND = 3e-4
"""The largest accepted difference of an advantage, from log-probs that both trainers round in another order."""
TRAINERS = ("CepoTrainer", "GRPOTrainer")
_COMPARED = ("step", "tokens", "largest_advantage", "largest_difference")


class Canned:
    """A sampler that returns responses sampled by another trainer, in the order of the requests."""

    def __init__(self, responses: Sequence[Sequence[int]], end_tokens: Sequence[int]) -> None:
        self._responses = responses
        self._end_tokens = end_tokens

    def generate(
        self, requests: Sequence[GenerationRequest], settings: SamplingSettings, on_finished: OnFinished | None = None
    ) -> list[list[Generation]]:
        """Returns the responses in groups; their log-probs, which credit does not read, are 0."""
        assert len(self._responses) == len(requests) * settings.num_samples, "each request has its group of responses"
        groups: list[list[Generation]] = [[] for _ in requests]
        for row, tokens in enumerate(self._responses):
            is_finished = tokens[-1] in self._end_tokens
            generation = Generation.of(tokens, [0.0] * len(tokens), finished=is_finished)
            groups[row // settings.num_samples].append(generation)
        return groups


class OwnTrainer:
    """cepo's own trainer of the example, which takes weights and responses from TRL."""

    def __init__(self, config: RunConfig, stack: ExitStack) -> None:
        self.trainer: Trainer = build_trainer(config, stack)
        assert isinstance(self.trainer.backend, Worker), "one device, in this process"
        self._worker = self.trainer.backend
        problems = [self.trainer.problems[index] for index in range(len(self.trainer.problems))]
        self._problems: dict[str, Problem] = {problem.text: problem for problem in problems}

    def take_adapter(self, model: Any) -> None:
        """Copies the adapter of a PEFT model into the actor and its engine."""
        adapter = get_peft_model_state_dict(model)
        copied: set[str] = set()
        for name, parameter in self._worker.actor.module.named_parameters():
            if not parameter.requires_grad:
                continue
            name_in_adapter = name.removeprefix("model.").replace(".default.", ".")
            local: Any = parameter.detach()
            local.to_local().copy_(adapter[name_in_adapter])
            copied.add(name_in_adapter)
        assert copied == adapter.keys(), "both trainers adapt the same layers"
        self._worker.synchronise_rollout()

    def advantages(self, questions: Sequence[str], responses: Sequence[Sequence[int]], *, step: int) -> Tensor:
        """Returns the advantages (B, T) of responses to these questions, in groups; `step` is 0-based."""
        trainer = self.trainer
        sampler = Canned(responses, trainer.processing.eos_token_ids)
        rollouts = trainer.sample_problems([self._problems[question] for question in questions], sampler, step=step)
        return trainer.estimate(trainer.score(trainer.plan(rollouts))).advantages

    def held_out(self) -> dict[str, float]:
        """Returns the metrics of a validation with the adapter that was taken last."""
        assert self.trainer.validator is not None, "the example has held-out problems"
        metrics, _ = self.trainer.validator.run(self.trainer.backend)
        return {name: value for name, value in results(metrics).items() if name.startswith("val/")}


class Recorder(TrainerCallback):
    """Records each step's seconds and reward, and the held-out accuracy before, at set steps and after the last."""

    def __init__(self, own: OwnTrainer, validate_every: int) -> None:
        self._own = own
        self._validate_every = validate_every
        self._began = 0.0
        self.seconds: list[float] = []
        self.rewards: list[float] = []
        self.held_out: dict[str, float] = {}
        self.num_held_out = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._validate(0, parts["model"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self.seconds.append(round(time.perf_counter() - self._began, 2))
        if state.global_step % self._validate_every == 0 or state.global_step == state.max_steps:
            self._validate(state.global_step, parts["model"])

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **parts: Any) -> None:
        if "reward" in logs:
            self.rewards.append(logs["reward"])
            print(f"step {state.global_step}/{state.max_steps}  reward {logs['reward']:.3f}", flush=True)

    def _validate(self, step: int, model: Any) -> None:
        self._own.take_adapter(model)
        metrics = self._own.held_out()
        accuracy = metrics["val/accuracy"]
        self.num_held_out = int(metrics["val/num_samples"])
        self.held_out[str(step)] = accuracy
        print(f"held-out accuracy after {step} steps: {accuracy:.3f}", flush=True)


class ComparedTrainer(CepoTrainer):
    """A `CepoTrainer` whose advantages in the first steps are compared with those of cepo's own trainer."""

    own: OwnTrainer
    num_compared: int
    comparisons: list[dict[str, float]]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        step = self._rollout_step()
        if step < self.num_compared:
            self.own.take_adapter(self.accelerator.unwrap_model(self.model))
            questions = [row["prompt"][-1]["content"] for row in inputs[:: self.num_generations]]
            expected = self.own.advantages(questions, self._sampled, step=step)  # (B, T)
            advantages = output["advantages"][:, : expected.shape[1]]
            comparison = {
                "step": step + 1,
                "tokens": sum(len(tokens) for tokens in self._sampled),
                "largest_advantage": float(expected.abs().max()),
                "largest_difference": float((advantages - expected).abs().max()),
            }
            print(comparison, flush=True)
            self.comparisons.append(comparison)
        return output


def rows_of(own: OwnTrainer) -> Dataset:
    """Returns the training problems as TRL reads them."""
    rows: list[dict[str, Any]] = []
    for index in range(len(own.trainer.problems)):
        problem = own.trainer.problems[index]
        prompt = [{"role": "user", "content": problem.text}]
        rows.append({"prompt": prompt, "answer": problem.ground_truth, "solution": problem.solution})
    return Dataset.from_list(rows)


def trl_config(config: RunConfig, folder: Path, *, micro_batch: int) -> GRPOConfig:
    """Returns the settings of `configs/real_model/base.yaml` under TRL's names."""
    rollout = config.worker.rollout
    optim = config.worker.actor.optim
    rows = config.data.rollout_batch_size * rollout.n
    assert config.trainer.max_steps is not None, "the number of steps is an option of the command"
    assert rows % micro_batch == 0, f"{rows} responses of a step are not a multiple of --micro-batch {micro_batch}"
    return GRPOConfig(
        output_dir=str(folder),
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=config.trainer.seed,
        max_steps=config.trainer.max_steps,
        learning_rate=optim.lr,
        weight_decay=optim.weight_decay,
        lr_scheduler_type="constant",
        max_grad_norm=config.worker.actor.max_grad_norm,
        gradient_checkpointing=False,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=rows // micro_batch,
        num_generations=rollout.n,
        max_completion_length=config.data.max_response_length,
        temperature=rollout.temperature,
        beta=0.0,
        epsilon=config.worker.actor.clip_ratio_low,
        epsilon_high=config.worker.actor.clip_ratio_high,
        delta=config.worker.actor.clip_ratio_dual,
        loss_type="dapo",
        scale_rewards="group",
    )


def trained(name: str, config: RunConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Trains with one of `TRAINERS` and returns its record."""
    lora = config.worker.actor.model.lora
    reward = load_reward(config.worker.reward.reward_function, {}, None)

    def accuracy(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        samples: list[dict[str, Any]] = []
        for completion, truth in zip(completions, answer, strict=True):
            samples.append({"response": completion[0]["content"], "ground_truth": truth})
        return [score["accuracy"] for score in reward.score(samples, first_sample=0)]

    with ExitStack() as stack:
        own = OwnTrainer(config, stack)
        recorder = Recorder(own, options.validate_every)
        arguments: dict[str, Any] = {
            "model": config.worker.actor.model.model_path,
            "reward_funcs": accuracy,
            "args": trl_config(config, options.runs / name, micro_batch=options.micro_batch),
            "train_dataset": rows_of(own),
            "peft_config": LoraConfig(r=lora.rank, lora_alpha=int(lora.alpha), target_modules="all-linear"),
            "callbacks": [recorder],
        }
        comparisons: list[dict[str, float]] = []
        if name == "CepoTrainer":
            trainer = ComparedTrainer(
                method=config.algorithm.adv_estimator,
                answer_function=config.worker.reward.answer_function,
                **arguments,
            )
            trainer.own = own
            trainer.num_compared = options.compared_steps
            trainer.comparisons = comparisons
        else:
            trainer = GRPOTrainer(**arguments)
        trainer.train()
    return {
        "trainer": name,
        "step_seconds": recorder.seconds,  # validations excluded, comparisons of the first steps included
        "trained": recorder.rewards,
        "held_out": recorder.held_out,
        "num_held_out": recorder.num_held_out,
        "comparisons": comparisons,
        "machine": machine_record(options.threads) | {"load_average": load_average()},
    }


def configuration(options: argparse.Namespace, runs: Path) -> RunConfig:
    """Returns the checked configuration of cepo's own trainer, which is also TRL's."""
    config = load_config(
        [
            "config=real_model/cepo",
            f"worker.actor.model.model_path={options.model}",
            f"trainer.max_steps={options.steps}",
            f"trainer.save_checkpoint_path={runs / 'own'}",
            "trainer.logger=[file]",
            "trainer.leak_probe_size=0",
            "worker.rollout.name=transformers",
            *options.settings,
        ]
    )
    check_config(config)
    return config


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="a.b.c=value, of both sides")
    parser.add_argument("--model", required=True, help="model folder or hub name")
    parser.add_argument("--trainers", default=",".join(TRAINERS), help="separated by commas")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--compared-steps", type=int, default=3)
    parser.add_argument("--validate-every", type=int, default=12, help="steps")
    parser.add_argument("--micro-batch", type=int, default=32, help="responses per pass of TRL")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--runs", type=Path, default=Path("build/real_model_in_trl"))
    parser.add_argument("--out", type=Path, default=RESULTS / "real_model_in_trl.json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains what is not finished, writes the record, and returns 1 if an advantage differs."""
    options = arguments_of(argv)
    options.runs = options.runs.absolute()
    torch.set_num_threads(options.threads)
    records: list[dict[str, Any]] = []
    for name in options.trainers.split(","):
        finished = options.runs / f"{name}.json"
        if not finished.exists():
            record = trained(name, configuration(options, options.runs / name), options)
            finished.parent.mkdir(parents=True, exist_ok=True)
            finished.write_text(json.dumps(record) + "\n", encoding="utf-8")
        records.append(json.loads(finished.read_text(encoding="utf-8")))
    comparisons = [comparison for record in records for comparison in record["comparisons"]]
    curve_rows: list[list[str]] = []
    for record in records:
        accuracies = [f"{step}: {accuracy:.3f}" for step, accuracy in record["held_out"].items()]
        mean_reward = sum(record["trained"]) / len(record["trained"])
        curve_rows.append([record["trainer"], f"{mean_reward:.3f}", ", ".join(accuracies)])
    compared_rows = [[f"{comparison[name]:.6g}" for name in _COMPARED] for comparison in comparisons]
    tables = [
        table(["trainer", "accuracy of all rollouts", "held-out accuracy after steps"], curve_rows),
        table(_COMPARED, compared_rows),
    ]
    save({"steps": options.steps, "bound": BOUND, "runs": records}, tables, options.out)
    return int(any(comparison["largest_difference"] > BOUND for comparison in comparisons))


if __name__ == "__main__":
    sys.exit(main())
