"""Fine-tunes a model on worked solutions with TRL's SFTTrainer, and writes the problems with which cepo trains it further.

    pip install -e '.[trl,cpu]'
    python3 examples/sft_first/sft.py --out sft-first
    cepo train config=examples/sft_first/after_sft.yaml

The task is new to the built-in toy model: the length of a rope that goes around a figure twice. Replace `worked_problems` by
your own rows.
"""

import argparse
import json
from pathlib import Path

from datasets import Dataset
from PIL import Image
from trl import SFTConfig, SFTTrainer

from cepo.microgeo import SHAPES

INSTRUCTION = "Answer in \\boxed{}."  # what the template data.format_prompt adds in the configuration


def worked_problems(number, *, stream):
    """Returns rows with an image, a question, its answer and a worked response, which only fine-tuning reads."""
    rows = []
    index = 0
    while len(rows) < number:
        problem = SHAPES.generate(0, index, stream=stream)
        index += 1
        if problem.family != "perimeter":
            continue
        sides = int(problem.seen)
        side = problem.numbers[0]
        around = sides * side
        rows.append(
            {
                "image": SHAPES.draw(problem),
                "question": f"Each side is {side}. How long is a rope that goes around twice?",
                "answer": str(2 * around),
                "response": f"{sides} sides. {sides}*{side}={around}. 2*{around}={2 * around}. \\boxed{{{2 * around}}}",
            }
        )
    return rows


def for_sft(rows):
    """Returns the rows as prompts and completions, a form of TRL's SFTTrainer for models that read images."""
    return Dataset.from_list(
        [
            {
                "images": [row["image"]],
                "prompt": [{"role": "user", "content": f"{row['question']} {INSTRUCTION}"}],
                "completion": [{"role": "assistant", "content": row["response"]}],
            }
            for row in rows
        ]
    )


def write_for_cepo(rows, file):
    """Writes the rows as cepo reads them: a question with a mark for its image, the image's file, and the answer."""
    images = file.parent / "images"
    images.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, row in enumerate(rows):
        image = images / f"{file.stem}_{number}.png"
        Image.Image.save(row["image"], image)
        line = {
            "problem": f"<image>{row['question']}",
            "images": [f"images/{image.name}"],
            "answer": row["answer"],
        }
        lines.append(json.dumps(line) + "\n")
    file.write_text("".join(lines), encoding="utf-8")


def main():
    """Fine-tunes the embedded model, and returns the folder with the model and the problems."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("sft-first"))
    options = parser.parse_args()
    arguments = SFTConfig(
        output_dir=str(options.out / "trainer"),
        max_steps=options.steps,
        learning_rate=3e-4,
        per_device_train_batch_size=32,
        max_length=None,  # a truncated prompt would lose tokens of its image
        completion_only_loss=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        logging_steps=10,
        save_strategy="no",
        report_to="none",
    )
    trainer = SFTTrainer(
        model=str(SHAPES.assets),
        args=arguments,
        train_dataset=for_sft(worked_problems(options.rows, stream="sft")),
    )
    trainer.train()
    trainer.save_model(options.out / "model")  # with its processor and chat template
    write_for_cepo(worked_problems(options.rows, stream="train"), options.out / "train.jsonl")
    write_for_cepo(worked_problems(options.rows // 4, stream="validation"), options.out / "held_out.jsonl")
    return options.out


if __name__ == "__main__":
    main()
