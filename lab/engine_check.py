"""Checks on random weights, step by step, everything that training requires of vLLM.

    python -m lab.engine_check --device cuda --shape 2b
    python -m lab.engine_check --device cpu --shape micro --weights full

Steps: a checkpoint of the shape's sizes in bf16; the engine's start; 8 responses to each of two prompts with an image;
comparison of their log-probs with the trainer's; a new adapter, after which no cached keys and values of the old one
may be used, or new full weights; sleeping and waking (on a GPU). A step that fails does not keep the later ones from
running, unless they need what it makes. The two kinds of weights are checked in processes of their own, as a run has
one engine in its life.

The log-probs may differ by twice what the trainer's own differ by between packed and padded rows, of the same tokens
and in the same type: that is the rounding of bf16 at these sizes. On an H200 it was 0.019 nats on average.

Exit code: 0 all passed, 1 a step failed, 3 a GPU is requested and there is none.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.support.machine import ROOT, machine_record
from testing.rows import generation_requests
from testing.shapes import SHAPES, Shape, write_checkpoint

if TYPE_CHECKING:
    from torch import Tensor

    from cepo.data.batch import ScoringRow
    from cepo.models.processing import Processing
    from cepo.rollout.generator import Generation, GenerationRequest
    from cepo.rollout.vllm_engine import VllmGenerator
    from cepo.workers.actor import Actor

SHORT_NAMES = {"2b": "qwen3-vl-2b", "4b": "qwen3-vl-4b"}
SAMPLES = 8
LORA_RANK = 16
SHARE_OF_MEMORY = 0.3
SMALLEST_LIMITS = {"mean": 1e-2, "99th percentile": 5e-2}
"""Limits in nats of the gap between the engine's and the trainer's log-probs where the trainer's own noise is smaller."""
NOISE_FACTOR = 2.0
"""What the engine's gap may be of the trainer's own between packed and padded rows."""
NO_CUDA = 3


@dataclass
class Step:
    """A step's name and what was measured in it; `error` is the traceback if it failed."""

    name: str
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    error: str | None = None

    def line(self) -> str:
        figures = "".join(f", {name} {value:.3g}" for name, value in self.figures.items())
        return f"{'ok  ' if self.error is None else 'FAIL'} {self.name}: {self.seconds:.1f} s{figures}"


class EngineCheck:
    """The steps of the check, each of which returns its figures or raises.

    Args:
        response: maximum number of tokens per response.
        lora_rank: rank of the adapter; 0 for full weights.
    """

    def __init__(
        self,
        shape: Shape,
        folder: Path,
        *,
        device: str,
        response: int,
        lora_rank: int,
        stack: ExitStack,
    ) -> None:
        self._shape = shape
        self._folder = folder
        self._device = device
        self._response = response
        self._lora_rank = lora_rank
        self._stack = stack
        self._processing: Processing
        self._requests: list[GenerationRequest]
        self._actor: Actor
        self._engine: VllmGenerator
        self._groups: list[list[Generation]] = []

    def steps(self) -> list[tuple[str, Callable[[], dict[str, float]]]]:
        on_gpu = self._device == "cuda"
        sleeping = [("sleep and wake", self.sleep_and_wake)] if on_gpu else []
        return [
            ("random checkpoint", self.checkpoint),
            ("trainer", self.trainer),
            ("engine start", self.start),
            (f"{SAMPLES} responses per prompt with an image", self.sample),
            ("log-probs of engine and trainer", self.gap),
            ("new weights, caches emptied", self.new_weights),
            *sleeping,
        ]

    def checkpoint(self) -> dict[str, float]:
        from cepo.models.processing import Processing

        write_checkpoint(self._shape, self._folder, device=self._device, dtype="bfloat16")
        self._processing = Processing(str(self._folder))
        self._requests = generation_requests(self._shape, self._processing, count=2)
        return {"GB": sum(file.stat().st_size for file in self._folder.glob("*.safetensors")) / 1e9}

    def trainer(self) -> dict[str, float]:
        from cepo.algorithms.settings import TeacherConfig
        from cepo.config import load_config
        from cepo.losses.objective import ObjectiveSettings
        from cepo.workers.actor import Actor

        settings = {"model.model_path": self._folder, "model.lora.rank": self._lora_rank, "fsdp.mp_param_dtype": "bf16"}
        arguments = [f"worker.actor.{name}={value}" for name, value in settings.items()]
        config = load_config([f"config={ROOT / 'configs' / 'microgeo' / 'base.yaml'}", *arguments])
        self._actor = Actor(
            config.worker.actor,
            self._processing,
            temperature=1.0,
            teacher=TeacherConfig(),
            objective_settings=ObjectiveSettings(),
            with_reference=False,
            total_steps=1,
            seed=1,
        )
        return {}

    def start(self) -> dict[str, float]:
        from cepo.rollout.generator import GeneratorSettings
        from cepo.rollout.vllm_engine import VllmGenerator

        settings = GeneratorSettings(
            model_path=str(self._folder),
            dtype="bf16",
            max_model_len=self._shape.prompt_tokens + self._response,
            gpu_memory_utilization=SHARE_OF_MEMORY,
            lora_rank=self._lora_rank,
        )
        self._engine = VllmGenerator(settings, self._processing)
        self._stack.callback(self._engine.close)
        return {}

    def sample(self) -> dict[str, float]:
        from cepo.rollout.generator import SamplingSettings

        settings = SamplingSettings(num_samples=SAMPLES, max_response_length=self._response)
        self._groups = self._engine.generate(self._requests, settings)
        assert [len(group) for group in self._groups] == [SAMPLES] * len(self._requests)
        sampled = [tuple(one.response_ids.tolist()) for group in self._groups for one in group]
        assert len(set(sampled)) > 1, "all responses are the same"
        banned = set(self._processing.banned_token_ids) - set(self._processing.eos_token_ids)
        assert not banned & {token for response in sampled for token in response}, "a banned token was sampled"
        return {"tokens": float(sum(map(len, sampled)))}

    def gap(self) -> dict[str, float]:
        """Checks the gaps between the engine's and the trainer's log-probs of the last samples against the limits."""
        rows = self._rows()
        scored = self._scored(rows)
        found = gaps(scored, self._sampled())
        noise = gaps(scored, self._scored(rows, packed=False))
        for name, limit in limits(noise).items():
            assert found[name] <= limit, (
                f"the {name} of the gaps is {found[name]:.3g} nats; at most {limit:.3g} is allowed, where the trainer's "
                f"own between packed and padded rows is {noise[name]:.3g}"
            )
        measured = {f"gap's {name}": gap for name, gap in found.items()}
        return measured | {f"trainer's own {name}": gap for name, gap in noise.items()}

    def _sampled(self) -> Tensor:
        import torch

        return torch.cat([torch.tensor(one.log_probs) for group in self._groups for one in group])

    def _scored(self, rows: list[ScoringRow], *, packed: bool = True) -> Tensor:
        """Returns the trainer's log-probs of all tokens, from padded rows if asked for."""
        import torch

        passes = self._actor.passes
        packs = passes.packed
        passes.packed = packs and packed
        try:
            return torch.cat(self._actor.score(rows))
        finally:
            passes.packed = packs
            self._actor.finish_step(0)

    def _rows(self) -> list[ScoringRow]:
        from cepo.data.batch import ScoringRow
        from cepo.models.processing import EncodedPrompt

        rows = []
        for request, group in zip(self._requests, self._groups, strict=True):
            images = self._processing.load_images(list(request.images))
            expanded = tuple(self._processing.expand(request.prompt_ids, images))
            context = EncodedPrompt(token_ids=expanded, engine_ids=request.prompt_ids, images=images)
            rows += [ScoringRow(context=context, response_ids=one.response_ids) for one in group]
        return rows

    def new_weights(self) -> dict[str, float]:
        """Checks that the engine samples from new weights and reads nothing that the old ones have cached."""
        part, spread = ("lora_B", 0.05) if self._lora_rank else ("language_model.norm.weight", 0.5)
        moved = self._redraw(part, spread=spread)
        self._engine.sync_weights(self._actor.rollout_weights())
        self.sample()
        return moved | self.gap()

    def sleep_and_wake(self) -> dict[str, float]:
        import torch

        torch.cuda.synchronize()
        awake = torch.cuda.mem_get_info()[0]
        self._engine.rest()
        asleep = torch.cuda.mem_get_info()[0]
        self.sample()
        assert asleep > awake, "sleeping freed nothing"
        return {"GB freed": (asleep - awake) / 1e9} | self.gap()

    def _redraw(self, part: str, *, spread: float) -> dict[str, float]:
        """Changes the weights with `part` in their names at random; returns how far the trainer's log-probs move."""
        import torch

        draw = torch.Generator().manual_seed(7)
        chosen = [weight for name, weight in self._actor.module.named_parameters() if part in name]
        assert chosen, f"no weight is called {part}"
        with torch.no_grad():
            for weight in chosen:
                local: Any = getattr(weight, "_local_tensor", weight)
                local.add_((torch.randn(local.shape, generator=draw) * spread).to(local))
        rows = self._rows()
        scored = self._scored(rows)
        moved = gaps(scored, self._sampled())["mean"]
        noise = gaps(scored, self._scored(rows, packed=False))
        assert moved > 1.5 * limits(noise)["mean"], (
            f"new weights move log-probs by {moved:.3g} nats: too little to be seen"
        )
        return {"log-probs moved by": moved}


def gaps(one: Tensor, other: Tensor) -> dict[str, float]:
    """Returns how far two log-probs of the same tokens are apart, in nats."""
    apart = (one - other).abs().double()
    return {"mean": float(apart.mean()), "99th percentile": float(apart.quantile(0.99)), "largest": float(apart.max())}


def limits(noise: Mapping[str, float]) -> dict[str, float]:
    """Returns the largest accepted gaps, where the trainer's own gaps are `noise`."""
    return {name: max(smallest, NOISE_FACTOR * noise[name]) for name, smallest in SMALLEST_LIMITS.items()}


NEEDED = ("checkpoint", "trainer", "start", "responses")
"""The words of steps without which no later one can run."""


def run(steps: Sequence[tuple[str, Callable[[], dict[str, float]]]]) -> list[Step]:
    """Runs the steps, up to one that fails and that all later ones need, and prints a line for each."""
    done: list[Step] = []
    for name, work in steps:
        step = Step(name)
        begun = time.perf_counter()
        try:
            step.figures = work()
        except Exception:
            step.error = traceback.format_exc()
        step.seconds = time.perf_counter() - begun
        done.append(step)
        sys.stdout.write(step.line() + "\n")
        sys.stdout.flush()
        if step.error is not None:
            sys.stdout.write("\n".join(step.error.splitlines()[-12:]) + "\n")
            if any(word in name for word in NEEDED):
                break
    return done


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check and prints its page; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=(*SHAPES, *SHORT_NAMES), default="2b")
    parser.add_argument("--weights", choices=("adapter", "full"), default="adapter")
    parser.add_argument("--response", type=int, default=64, help="tokens of a response")
    options = parser.parse_args(arguments)
    shape = SHAPES[SHORT_NAMES.get(str(options.shape), str(options.shape))]

    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("engine_check: torch sees no GPU; --device cpu runs the same against vLLM's CPU build\n")
        return NO_CUDA
    machine = machine_record(torch.get_num_threads())
    on = ", ".join(machine["devices"]) or machine["processor"]
    versions = ", ".join(f"{name} {found}" for name, found in machine["versions"].items())
    sys.stdout.write(
        f"engine check of {machine['date']} at {shape.name}'s sizes in bf16 ({options.weights} weights) on {on}; {versions}\n"
    )
    with tempfile.TemporaryDirectory(prefix="cepo-engine-check-") as folder, ExitStack() as stack:
        check = EngineCheck(
            shape,
            Path(folder) / "model",
            device=options.device,
            response=options.response,
            lora_rank=LORA_RANK if options.weights == "adapter" else 0,
            stack=stack,
        )
        steps = run(check.steps())
    passed = all(step.error is None for step in steps)
    sys.stdout.write(f"engine check: {'passed' if passed else 'FAILED'}\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
