"""Both generators end a response where the chat template ends an assistant's turn, and leave its end in the tokens."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest
from generator_cases import open_generator, request
from scripted_models import declare_end, say
from tiny_checkpoints import write_checkpoint

from cepo.models.processing import Processing
from cepo.rollout.generator import Generation, SamplingSettings

pytestmark = pytest.mark.heavy

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}END\n{% endfor %}[assistant]="


def generated(engine: str, folder: Path, processing: Processing) -> list[Generation]:
    """A response, and one that ignores its end."""
    prompt = request(processing, "1 + 1", seed=0)
    greedy = SamplingSettings(num_samples=1, max_response_length=16, temperature=0.0)
    endless = dataclasses.replace(greedy, ignore_eos=True)
    generations: list[Generation] = []
    with contextlib.closing(open_generator(engine, folder, processing)) as generator:
        for settings in (greedy, endless):
            (group,) = generator.generate([prompt], settings)
            generations += group
    return generations


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
@pytest.mark.parametrize("end", ["<|im_end|>", "</s>"])
def test_a_generator_stops_at_the_end_of_the_turn(engine: str, end: str, tmp_path: Path) -> None:
    """One is a token that the files do not declare, the other a text of four tokens."""
    folder = write_checkpoint("qwen2", tmp_path / "model")
    declare_end(folder, "<|endoftext|>")
    template = TEMPLATE.replace("END", end)
    processing = Processing(str(folder), chat_template=template)
    assert processing.end.text == ("" if end == "<|im_end|>" else end)
    script = token_ids(processing, f"=2{end}+")
    say(folder, script)
    generation, whole = generated(engine, folder, processing)
    response = generation.response_ids.tolist()
    assert response == script[1:-1]
    assert generation.finished
    assert len(generation.log_probs) == len(response)
    assert generation.log_probs.min() > -0.01
    assert processing.decode(response) == "2"
    assert len(whole.response_ids) == 16
    assert not whole.finished


def token_ids(processing: Processing, text: str) -> list[int]:
    return processing.tokenizer(text, add_special_tokens=False)["input_ids"]
