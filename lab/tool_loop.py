r"""Takes one step of `CepoTrainer` in TRL's own tool loop, and prints who wrote each token, its mask and its credit.

    python3 -m lab.tool_loop

The embedded model has not learned to call tools. Its logits are replaced so that it writes `TURNS`, while TRL's code
generates, parses and runs the calls, adds their results and generates again, and every log-prob is the model's own.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from cepo.integrations.trl import CepoTrainer
from testing.tool_loop import TURNS, output_of_training, trainer_with_tools


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one step's transcripts and the frequency of calls."""
    parser = argparse.ArgumentParser(prog="python3 -m lab.tool_loop", description="Shows one step in TRL's tool loop.")
    parser.add_argument("--method", default="cepo", help="as in algorithm.adv_estimator")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_with_tools(folder, TURNS, tools=[multiply], method=options.method)
        output = output_of_training(trainer)
    for row in range(len(TURNS)):
        print(f"response {row + 1}")
        for line in transcript(trainer, output, row):
            print(f"  {line}")
    for name, value in sorted(trainer.state.log_history[0].items()):
        if name.startswith("tools/"):
            print(f"{name}: {value:.4g}")
    return 0


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def transcript(trainer: CepoTrainer, output: dict[str, Any], row: int) -> list[str]:
    """Returns two lines for each stretch of tokens that the model or a tool wrote: its credit, and its text."""
    is_response = output["completion_mask"][row].bool()
    ids = output["completion_ids"][row][is_response].tolist()
    masks = output["tool_mask"][row][is_response].tolist()
    credits = output["advantages"][row][is_response].tolist()
    lines: list[str] = []
    for mask, stretch in itertools.groupby(range(len(ids)), key=lambda position: masks[position]):
        positions = list(stretch)
        text = trainer.processing_class.tokenizer.decode([ids[position] for position in positions])
        credit = [credits[position] for position in positions]
        writer = "model" if mask else "tool"
        lines.append(f"{writer}: {len(positions)} tokens, mask {mask}, credit {min(credit):+.3f} to {max(credit):+.3f}")
        lines.append(f"    {text!r}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
