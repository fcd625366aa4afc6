"""A TRL script for GRPO with images that trains with CEPO instead; the two changed lines are marked.

    pip install -e ".[trl,cpu]"
    python3 examples/trl_grpo.py --steps 3

The built-in toy task gives a model and problems, so that it runs on a CPU without a download. With your own data, give the
column of the right answers as `ground_truth`, "answer" by default.
"""

import argparse
import re

from datasets import Dataset
from trl import GRPOConfig

from cepo.integrations.trl import CepoTrainer  # 1. was: from trl import GRPOTrainer
from cepo.microgeo import SHAPES


def accuracy(completions, answer, **_):
    """Returns 1 for each response whose last box holds the right answer."""
    found = [re.findall(r"\\boxed\{([^}]*)\}", completion[0]["content"]) for completion in completions]
    return [float(boxes[-1:] == [truth]) for boxes, truth in zip(found, answer, strict=True)]


def problems(number):
    """Returns a data set with the columns prompt, images and answer."""
    drawn = [SHAPES.generate(0, index, stream="train") for index in range(number)]
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": f"{each.question} Answer in \\boxed{{}}."}],
                "images": [SHAPES.draw(each)],
                "answer": each.answer,
            }
            for each in drawn
        ]
    )


def main():
    """Trains the embedded model, and returns the trainer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", default="trl-run")
    options = parser.parse_args()
    arguments = GRPOConfig(
        output_dir=options.out,
        max_steps=options.steps,
        learning_rate=1e-4,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        num_generations=8,
        max_completion_length=64,
        temperature=1.0,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = CepoTrainer(  # 2. was: GRPOTrainer(
        model=str(SHAPES.assets),
        reward_funcs=accuracy,
        args=arguments,
        train_dataset=problems(512),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
