"""Measures on a CPU whether vLLM's memory grows over many weight synchronisations and new images.

    python3 benchmarks/engine_memory.py --out benchmarks/results [--rounds 60]

Each round gives the engine new weights (adapters in one process, full weights in another) and samples 8 responses of 32
tokens to each of 8 prompts with new images. The resident memory of the process fluctuates with the allocator, so the
minimum of the first 10 rounds is compared with that of the last 10.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

IMAGE_SIDE = 320
LORA_RANK = 8
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def measure(kind: str, rounds: int) -> dict[str, Any]:
    """Returns the resident MiB after each round, with the engine in this process."""
    from cepo.microgeo.model import build_untrained_model
    from cepo.models.processing import Processing
    from cepo.rollout.factory import build_generator
    from cepo.rollout.generator import GenerationRequest, GeneratorSettings, SamplingSettings

    with tempfile.TemporaryDirectory() as temporary:
        folder = build_untrained_model(Path(temporary) / "model", seed=0)
        processing = Processing(str(folder))
        model = _model(folder, kind)
        built = GeneratorSettings(
            name="vllm",
            model_path=str(folder),
            dtype="fp32",
            max_model_len=512,
            lora_rank=LORA_RANK if kind == "lora" else 0,
        )
        generator = build_generator(built, processing, device="cpu")
        settings = SamplingSettings(num_samples=8, max_response_length=32, ignore_eos=True)
        resident = []
        for number in range(rounds):
            generator.sync_weights(_weights(model, kind))
            requests = []
            for seed in range(8 * number, 8 * number + 8):
                image = _image(seed)
                prompt = processing.encode("<image>Find x in the figure.", processing.load_images([image]))
                requests.append(
                    GenerationRequest(
                        prompt_ids=prompt.engine_ids,
                        num_prompt_tokens=len(prompt.token_ids),
                        images=(image,),
                        seed=seed,
                    )
                )
            generator.generate(requests, settings)
            resident.append(_resident_mib())
        hits = generator.drain_metrics()["work/rollout_prefix_hits"].result
        generator.close()
    return {"kind": kind, "resident_mib": resident, "prefix_hits": hits, "prompt_tokens": len(prompt.token_ids)}


def _model(folder: Path, kind: str) -> Any:
    import peft
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    if kind == "full":
        return model
    config = peft.LoraConfig(r=LORA_RANK, lora_alpha=8, target_modules=TARGETS, exclude_modules=".*visual.*")
    return peft.get_peft_model(model, config)


def _weights(model: Any, kind: str) -> Any:
    import peft
    import torch

    from cepo.rollout.generator import AdapterWeights, FullWeights

    if kind == "full":
        return FullWeights(tensors=model.state_dict())
    drawn = {name: 0.02 * torch.randn(tensor.shape) for name, tensor in peft.get_peft_model_state_dict(model).items()}
    return AdapterWeights(tensors=drawn, adapter_config=model.peft_config["default"].to_dict())


def _image(seed: int) -> Any:
    import numpy
    from PIL import Image

    shape = (IMAGE_SIDE, IMAGE_SIDE, 3)
    return Image.fromarray(numpy.random.default_rng(seed).integers(0, 256, shape, dtype=numpy.uint8))


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--kind", choices=["lora", "full"], help="measure this one in this process and print JSON")
    arguments = parser.parse_args()
    if arguments.kind:
        sys.stdout.write(json.dumps(measure(arguments.kind, arguments.rounds)) + "\n")
        return
    rows = []
    for kind in ("lora", "full"):
        command = [sys.executable, __file__, "--kind", kind, "--rounds", str(arguments.rounds)]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        row = json.loads(answer.strip().splitlines()[-1])
        first, last = min(row["resident_mib"][:10]), min(row["resident_mib"][-10:])
        sys.stdout.write(f"{kind}: floor {first} MiB at first, {last} MiB at last, {last - first:+.1f} MiB\n")
        rows.append(row)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "engine_memory.json").write_text(json.dumps(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
