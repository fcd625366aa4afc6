"""The example of eyes that speak words: its figures, its tower, and a training step, on a tiny language model."""

from __future__ import annotations

import copy
import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cepo.config import check_config, load_config
from cepo.train import train

EXAMPLE = Path(__file__).parents[2] / "examples" / "eyes"


@pytest.fixture(scope="module")
def example() -> Any:
    """The names of `tower.py`, which imports `figures.py` from its own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        return runpy.run_path(str(EXAMPLE / "tower.py"))


@pytest.fixture(scope="module")
def figures(example: Any) -> Any:
    return example["figures"]


@pytest.fixture(scope="module")
def language_model(example: Any, figures: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 2 layers whose tokenizer, like SmolLM2's, has a token for each digit and each word of a caption."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    pieces = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    pieces.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    pieces.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [figure.caption + figures.QUESTION for figure in figures.all_figures()]
    pieces.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pieces, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.35)  # as long as SmolLM2's
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    folder = tmp_path_factory.mktemp("language_model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def seeing(example: Any, language_model: Path) -> tuple[Any, Any]:
    """The processor, and the model with an untrained tower."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        processor = example["build_processor"](language_model)
        return processor, example["build_model"](language_model, processor)


def test_no_caption_is_both_trained_on_and_held_out(figures: Any) -> None:
    """84 groups (7 counts, 4 colours, 3 shapes) and 83 other groups beside each: 6,972 figures, 256 of them held out."""
    training, held_out = figures.split(0)
    captions = {figure.caption for figure in training}
    assert len(captions) == 6972 - 256
    assert len(held_out) == 256
    assert captions.isdisjoint({figure.caption for figure in held_out})


def test_a_figure_has_one_colour_in_each_half(figures: Any) -> None:
    figure = figures.Figure(figures.Group(3, "red", "circles"), figures.Group(8, "blue", "squares"))
    pixels = np.asarray(figures.draw(figure, figures.random.Random(0)))
    for half, colour in ((pixels[:, :32], "red"), (pixels[:, 32:], "blue")):
        assert {tuple(pixel) for pixel in half.reshape(-1, 3).tolist()} == {figures.PAPER, figures.COLOURS[colour]}


def test_every_worked_solution_names_counts_and_their_sum(figures: Any) -> None:
    figure = figures.Figure(figures.Group(3, "red", "circles"), figures.Group(8, "blue", "squares"))
    assert figure.caption == "There are 3 red circles and 8 blue squares in the picture.\n"
    assert figure.solution == "There are 3 + 8 = 11 shapes in the picture."
    assert figure.answer == "11"


def test_the_captions_loss_is_that_worked_out_by_hand(example: Any) -> None:
    """Words at (0, 0) and (2, 0), an output at (1, 1) whose word is the first: squared distances are 2 and 2.

    The cross-entropy is log 2, and the relative distance 2 over the words' mean square norm, which is 2.
    """
    embeddings = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    outputs = torch.tensor([[[1.0, 1.0]]])
    assert example["squared_distances"](outputs, embeddings).tolist() == [[[2.0, 2.0]]]
    loss = example["caption_loss"](outputs, torch.tensor([[0]]), embeddings)
    assert loss.item() == pytest.approx(math.log(2) + 1)


def test_a_tower_reads_pixels_as_the_image_processor_does(example: Any, figures: Any, seeing: tuple[Any, Any]) -> None:
    processor, _ = seeing
    figure = figures.split(0)[0][0]
    image = figures.draw(figure, figures.random.Random(5))
    processed = processor.image_processor(image, return_tensors="pt")
    drawn = example["pixel_values"]([figure], figures.random.Random(5))
    torch.testing.assert_close(processed.pixel_values, drawn, atol=1e-5, rtol=0)


def test_a_model_with_eyes_reads_text_as_before(language_model: Path, seeing: tuple[Any, Any]) -> None:
    from transformers import AutoModelForCausalLM

    processor, model = seeing
    token_ids = processor.tokenizer("How many shapes are there?", return_tensors="pt").input_ids
    without_eyes: Any = AutoModelForCausalLM.from_pretrained(language_model)
    with torch.no_grad():
        expected = without_eyes(token_ids).logits  # (1, T, words)
        logits = model(token_ids).logits  # (1, T, words and marks)
    torch.testing.assert_close(logits[..., : expected.shape[-1]], expected)
    assert not logits[..., expected.shape[-1] :].any()


def test_features_equal_to_embeddings_read_as_the_caption(
    example: Any, figures: Any, seeing: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last logits with a perfect tower are those of the prompt with the caption's tokens as the image's."""
    processor, model = seeing
    figure = figures.split(0)[0][0]
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": figures.QUESTION}]}]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(text=prompt, images=[figures.draw(figure, figures.random.Random(0))], return_tensors="pt")
    caption = example["caption_ids"]([figure], processor.tokenizer)
    assert caption.shape == (1, example["CAPTION_TOKENS"])
    embeddings = model.get_input_embeddings()(caption)
    monkeypatch.setattr(model.model.connector, "forward", lambda _: embeddings)
    as_text = inputs.input_ids.clone()
    as_text[as_text == processor.image_token_id] = caption.flatten()
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, model(as_text).logits)


@pytest.mark.heavy
def test_a_tower_learns_the_words_of_a_figure(example: Any, figures: Any, seeing: tuple[Any, Any]) -> None:
    """150 steps on one caption: each output becomes the nearest to its word of the whole vocabulary, wherever shapes are."""
    processor, model = seeing
    training = figures.split(0)[0][:1]
    embeddings_before = copy.deepcopy(model.get_input_embeddings().weight)
    steps = example["train_tower"](
        model, processor.tokenizer, training, num_steps=150, batch_size=4, peak_rate=2e-3, seed=0
    )
    losses = [loss for _, loss in steps]
    assert len(losses) == 150
    assert losses[-1] < 0.1 * losses[0]
    accuracy = example["reading_accuracy"](model, processor.tokenizer, training, seed=1)
    assert accuracy["captions"] == accuracy["counts"] == accuracy["tokens"] == 1
    assert torch.equal(model.get_input_embeddings().weight, embeddings_before)


@pytest.mark.heavy
def test_a_written_model_trains_a_step_on_its_figures(
    example: Any, figures: Any, language_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 problems x 4 responses, sampled by transformers; the sampler's log-probs are the trainer's."""
    folder = tmp_path / "eyes"
    monkeypatch.setattr(sys, "argv", ["figures.py", str(folder)])
    figures.main()
    monkeypatch.setattr(sys, "argv", ["tower.py", str(language_model), str(folder / "model"), "--steps", "2"])
    example["main"]()
    config = load_config(
        [
            "config=examples/eyes/eyes.yaml",
            f"data.train_files={folder / 'train.jsonl'}",
            f"data.val_files={folder / 'held_out.jsonl'}",
            f"data.image_dir={folder}",
            f"worker.actor.model.model_path={folder / 'model'}",
            "worker.actor.global_batch_size=2",
            "worker.rollout.n=4",
            "data.rollout_batch_size=2",
            "data.max_response_length=8",
            "trainer.max_steps=1",
            "trainer.val_freq=-1",
            "trainer.val_before_train=false",
            "trainer.logger=[file]",
            f"trainer.save_checkpoint_path={tmp_path / 'run'}",
        ]
    )
    check_config(config)
    train(config)
    [line] = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["rollout/log_prob_gap_max"] < 1e-4
