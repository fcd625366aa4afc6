"""Gives a language model eyes that speak words, and writes the model folder.

    python examples/eyes/tower.py LANGUAGE_MODEL_FOLDER build/eyes/model

The model is an Idefics3 with the weights of the language model (a Llama) and a small vision tower. The tower alone is
trained, without the language model: its k-th output becomes the embedding of the k-th token of the figure's caption.
The language model then reads the figure as if its caption stood in the prompt.
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import figures
import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
)

CAPTION_TOKENS = 16  # one for each patch of a figure
IMAGE_MARKS = ("<fake_token_around_image>", "<global-img>", "<image>", "<end_of_utterance>")
CHAT_TEMPLATE = """\
{%- if messages[0].role != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}{{- '<image>' if part.type == 'image' else part.text -}}{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
TOWER = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": figures.IMAGE_SIDE,
    "patch_size": figures.CELL_SIDE,
}


def build_processor(language_folder: Path) -> Any:
    """Returns the language model's tokenizer with Idefics3's marks, and a reader of images that are not tiled."""
    tokenizer = AutoTokenizer.from_pretrained(language_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(IMAGE_MARKS)}, replace_extra_special_tokens=False)
    side = {"longest_edge": figures.IMAGE_SIDE}
    middle = [0.5, 0.5, 0.5]
    images = Idefics3ImageProcessor(
        do_image_splitting=False, size=side, max_image_size=side, image_mean=middle, image_std=middle
    )
    return Idefics3Processor(images, tokenizer, image_seq_len=CAPTION_TOKENS, chat_template=CHAT_TEMPLATE)


def build_model(language_folder: Path, processor: Any) -> Any:
    """Returns the language model behind a vision tower with random weights.

    The embeddings of the marks around an image are 0: the language model has never seen them.
    """
    language_model: Any = AutoModelForCausalLM.from_pretrained(language_folder, dtype=torch.float32)
    tokenizer = processor.tokenizer
    old_size = language_model.config.vocab_size
    language_model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        language_model.get_input_embeddings().weight[old_size:] = 0
    config = Idefics3Config(
        text_config=language_model.config.to_dict(),
        vision_config=TOWER,
        scale_factor=1,
        image_token_id=processor.image_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    config.dtype = "float32"
    model = Idefics3ForConditionalGeneration(config)
    model.model.text_model.load_state_dict(language_model.model.state_dict())
    model.generation_config = GenerationConfig.from_pretrained(language_folder)
    return model


def caption_ids(some_figures: Sequence[figures.Figure], tokenizer: Any) -> Tensor:
    """Returns the tokens of the figures' captions, (figures, CAPTION_TOKENS)."""
    token_ids = tokenizer([figure.caption for figure in some_figures], add_special_tokens=False).input_ids
    return torch.tensor(token_ids)


def pixel_values(some_figures: Sequence[figures.Figure], random_numbers: random.Random) -> Tensor:
    """Draws the figures and returns their pixels as the image processor scales them, (figures, 1, 3, side, side)."""
    images = [np.asarray(figures.draw(figure, random_numbers)) for figure in some_figures]
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)  # (figures, 3, side, side)
    return (pixels / 127.5 - 1).unsqueeze(1)


def nearest_words(outputs: Tensor, embeddings: Tensor) -> Tensor:
    """Returns the index of the embedding with the least distance to each output: (..., H), (words, H) -> (...)."""
    return squared_distances(outputs, embeddings).argmin(-1)


def squared_distances(outputs: Tensor, embeddings: Tensor) -> Tensor:
    """Returns |output - embedding|^2 of all pairs: (..., H), (words, H) -> (..., words)."""
    products = outputs @ embeddings.T
    return outputs.square().sum(-1, keepdim=True) - 2 * products + embeddings.square().sum(-1)


def caption_loss(outputs: Tensor, labels: Tensor, embeddings: Tensor) -> Tensor:
    """Returns the loss of outputs (figures, CAPTION_TOKENS, H) whose words are `labels`, indices of `embeddings`.

    The sum of two means over tokens: the cross-entropy of softmax(-|output - embedding|^2), which teaches which word it
    is, and |output - embedding|^2 relative to the embeddings' mean square norm, so that the output has the word's place
    and length, not its direction alone.
    """
    distances = squared_distances(outputs, embeddings)  # (figures, CAPTION_TOKENS, words)
    cross_entropy = nn.functional.cross_entropy(-distances.flatten(0, 1), labels.flatten())
    to_own_word = distances.gather(-1, labels.unsqueeze(-1))
    return cross_entropy + to_own_word.mean() / embeddings.square().sum(-1).mean()


def image_features(model: Any, pixels: Tensor) -> Tensor:
    """Returns the outputs of tower and connector, (figures, CAPTION_TOKENS, H)."""
    return model.get_image_features(pixels).pooler_output


def train_tower(
    model: Any,
    tokenizer: Any,
    training_figures: Sequence[figures.Figure],
    *,
    num_steps: int,
    batch_size: int = 128,
    peak_rate: float = 1e-3,
    seed: int = 0,
) -> Iterator[tuple[int, float]]:
    """Trains tower and connector on newly drawn figures; yields the number of each step and its loss."""
    # Classes are the captions' words alone; `reading_accuracy` compares with the whole vocabulary.
    words = caption_ids(training_figures, tokenizer).unique()  # sorted
    embeddings = model.get_input_embeddings().weight.detach()[words]
    parameters = [*model.model.vision_model.parameters(), *model.model.connector.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=peak_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak_rate, total_steps=num_steps, pct_start=0.1)
    random_numbers = random.Random(seed)
    for step in range(1, num_steps + 1):
        batch = random_numbers.choices(training_figures, k=batch_size)
        labels = torch.searchsorted(words, caption_ids(batch, tokenizer))
        outputs = image_features(model, pixel_values(batch, random_numbers))
        loss = caption_loss(outputs, labels, embeddings)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        yield step, loss.item()


@torch.no_grad()
def reading_accuracy(
    model: Any, tokenizer: Any, some_figures: Sequence[figures.Figure], *, seed: int
) -> dict[str, float]:
    """Compares the nearest embeddings of the whole vocabulary with the captions of newly drawn figures.

    Returns the shares of right tokens, of right counts and of wholly right captions, and the mean distance from the
    outputs to the embeddings of their words, relative to the embeddings' norms.
    """
    embeddings = model.get_input_embeddings().weight
    token_ids = caption_ids(some_figures, tokenizer)
    outputs = image_features(model, pixel_values(some_figures, random.Random(seed)))
    right = nearest_words(outputs, embeddings) == token_ids
    digits = torch.tensor(tokenizer.convert_tokens_to_ids([str(count) for count in figures.COUNTS]))
    own_embeddings = embeddings[token_ids]
    distances = (outputs - own_embeddings).norm(dim=-1) / own_embeddings.norm(dim=-1)
    return {
        "tokens": right.float().mean().item(),
        "counts": right[torch.isin(token_ids, digits)].float().mean().item(),
        "captions": right.all(-1).float().mean().item(),
        "relative distance": distances.mean().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("language_model", type=Path, help="a folder that examples/real_model/weights.py writes")
    parser.add_argument("folder", type=Path, help="where to write the model with eyes")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    training_figures, held_out = figures.split(arguments.seed)
    processor = build_processor(arguments.language_model)
    model = build_model(arguments.language_model, processor)
    steps = train_tower(model, processor.tokenizer, training_figures, num_steps=arguments.steps, seed=arguments.seed)
    for step, loss in steps:
        if step % 100 == 0:
            print(f"step {step} of {arguments.steps}: loss {loss:.3f}", flush=True)
    accuracy = reading_accuracy(model, processor.tokenizer, held_out[:64], seed=arguments.seed + 1)
    print("held-out figures: " + ", ".join(f"{name} {value:.3f}" for name, value in accuracy.items()))
    model.save_pretrained(arguments.folder)
    # safetensors makes files that only their owner can read
    shutil.copymode(arguments.folder / "config.json", arguments.folder / "model.safetensors")
    processor.save_pretrained(arguments.folder)


if __name__ == "__main__":
    main()
