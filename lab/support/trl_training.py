"""Implements a measured process of TRL's GRPOTrainer, with model, problems, lengths and rewards of the other side.

    python -m lab.support.trl_training OPTIONS-AS-JSON

The other side is `lab.support.training`. TRL itself is unchanged. A logits processor of `generate` ends
responses where the script says, which costs one write to the logits of each ending row. The stages' times come from
TRL's own profiling contexts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.support.model_flops import ModelFlops
from lab.support.paired import Record, StepServer
from lab.support.problems import WorkOptions, write_problems
from testing.shapes import SHAPES, write_checkpoint

STAGES = {"transformers.generate": "generate", "_get_per_token_logps_and_entropies": "forward", "compute_loss": "loss"}
"""TRL's profiling contexts and their names here; `loss` includes `forward`."""


class PeerTraining:
    """A TRL trainer that performs steps on request and counts their work."""

    def __init__(self, options: WorkOptions) -> None:
        from cepo.models.processing import Processing

        self.options, self.shape = options, SHAPES[options.shape]
        self.script = options.script
        folder = Path(options.folder)
        self.model_path = write_checkpoint(self.shape, folder / "models" / self.shape.name)
        self.processing = Processing(str(self.model_path))
        self.problems = write_problems(
            self.shape, folder / f"{self.shape.name}.parquet", self.processing, count=4 * options.prompts
        )
        self.endings = {right: self.script.ending(self.processing, right=right) for right in (False, True)}
        self.stages: dict[str, float] = {}
        self.tokens: dict[str, float] = {}
        self.generations = 0
        self.server = StepServer()
        self.began = (0.0, 0.0)

    def serve(self) -> None:
        """Trains, one step per request."""
        trainer = self._trainer()
        self._observe(trainer)
        if self.server.wait():
            self.began = (time.perf_counter(), time.process_time())
            trainer.train()

    def _trainer(self) -> Any:
        from datasets import load_dataset
        from peft import LoraConfig
        from trl import GRPOConfig, GRPOTrainer

        options = self.options
        rows = options.prompts * self.shape.group_size
        dataset = load_dataset("parquet", data_files=str(self.problems), split="train")
        dataset = dataset.map(_conversation, remove_columns=["problem", "answer"])
        lora = None
        if options.lora_rank > 0:
            lora = LoraConfig(
                r=options.lora_rank,
                lora_alpha=2 * options.lora_rank,
                target_modules="all-linear",
                exclude_modules=".*visual.*",
            )
        config = GRPOConfig(
            output_dir=str(Path(options.folder) / "run-trl"),
            use_cpu=not _has_gpu(),
            bf16=False,
            model_init_kwargs={"dtype": "float32"},
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            max_steps=options.steps,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            gradient_checkpointing=options.gradient_checkpointing,
            per_device_train_batch_size=options.micro_batch,
            gradient_accumulation_steps=rows // options.micro_batch,
            num_generations=self.shape.group_size,
            max_completion_length=self.shape.longest,
            temperature=1.0,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            delta=3.0,
            loss_type="dapo",
            scale_rewards="group",
            shuffle_dataset=False,
        )
        return GRPOTrainer(
            model=str(self.model_path),
            reward_funcs=self._rewards,
            args=config,
            train_dataset=dataset,
            peft_config=lora,
            callbacks=[self._turn_taker()],
        )

    def _rewards(self, completions: Sequence[Any], **_: Any) -> list[float | None]:
        size = self.shape.group_size
        return [float(self.script.is_right(row // size, row % size)) for row in range(len(completions))]

    def _observe(self, trainer: Any) -> None:
        import trl.extras.profiling as profiling

        stages, tokens = self.stages, self.tokens

        def keep(self: Any, duration: float) -> None:
            for ending, name in STAGES.items():
                if self.name.endswith(ending):
                    stages[name] = stages.get(name, 0.0) + duration

        profiling.ProfilingContext._log_metrics = keep
        score = trainer._get_per_token_logps_and_entropies

        def counted(model: Any, input_ids: Any, attention_mask: Any, *rest: Any, **named: Any) -> Any:
            tokens["update"] = tokens.get("update", 0.0) + int(attention_mask.sum())
            tokens["update, padding included"] = tokens.get("update, padding included", 0.0) + input_ids.numel()
            return score(model, input_ids, attention_mask, *rest, **named)

        trainer._get_per_token_logps_and_entropies = counted
        generate = trainer.model.generate

        def scripted(**inputs: Any) -> Any:
            found, wanted = inputs["input_ids"].shape[1], self.shape.prompt_tokens
            assert found == wanted, f"TRL's prompt has {found} tokens, the shape's {wanted}: this is not the same work"
            ends = self._ends()
            whole = generate(**inputs, logits_processor=[ends])
            tokens["generate"] = float(sum(map(sum, self.script.lengths(self.generations))))
            self.generations += 1
            return whole

        trainer.model.generate = scripted

    def _ends(self) -> Any:
        """The logits processor of one `generate`, which forces each row's last tokens and prevents an earlier end."""
        import torch

        lengths = [length for group in self.script.lengths(self.generations) for length in group]
        size, prompt, endings = self.shape.group_size, self.shape.prompt_tokens, self.endings
        banned = torch.tensor([*self.processing.banned_token_ids, *self.processing.eos_token_ids])

        def process(input_ids: Any, scores: Any) -> Any:
            done = input_ids.shape[1] - prompt
            scores[:, banned] = float("-inf")
            for row, length in enumerate(lengths):
                ending = endings[self.script.is_right(row // size, row % size)]
                begun = done + len(ending) - length
                if 0 <= begun < len(ending):
                    scores[row] = float("-inf")
                    scores[row, ending[begun]] = 0.0
            return scores

        return process

    def _turn_taker(self) -> Any:
        from transformers import TrainerCallback

        peer = self

        class TurnTaker(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                wall, processor = peer.began
                peer.server.report(peer.record(time.perf_counter() - wall, time.process_time() - processor))
                if not peer.server.wait():
                    control.should_training_stop = True
                peer.began = (time.perf_counter(), time.process_time())

        return TurnTaker()

    def record(self, seconds: float, processor_seconds: float) -> Record:
        """Returns the record of the step that has just ended, and resets the counters."""
        found: Mapping[str, float] = dict(self.stages)
        stages = {"generate": found["generate"], "update": seconds - found["generate"]}
        tokens = dict(self.tokens)
        self.stages.clear()
        self.tokens.clear()
        return {
            "seconds": seconds,
            "processor_seconds": processor_seconds,
            "stages": stages,
            "parts": {"forward": found.get("forward", 0.0), "loss": found.get("loss", 0.0)},
            "tokens": tokens,
            "flops": self._flops(self.generations - 1),
            "counts": {"responses": self.options.prompts * self.shape.group_size},
        }

    def _flops(self, step: int) -> dict[str, float]:
        """Operations where every sample reads its own prompt and image, and all rows have the longest row's length."""
        costs, options, prompt = ModelFlops(self.shape, self.options.lora_rank), self.options, self.shape.prompt_tokens
        lengths = [length for group in self.script.lengths(step) for length in group]
        longest, rows = max(lengths), len(lengths)
        update = costs.update(prompt, [longest] * rows, checkpointing=options.gradient_checkpointing, images=rows)
        return {"generate": float(rows * costs.generate(prompt, [longest])), "update": float(update)}


def _conversation(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": row["problem"].removeprefix("<image>")}]}


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main() -> None:
    """Serves steps of the training described by the first argument."""
    PeerTraining(WorkOptions(**json.loads(sys.argv[1]))).serve()


if __name__ == "__main__":
    main()
