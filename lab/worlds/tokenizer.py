"""Builds the embedded model's byte-level BPE tokenizer with Qwen's pre-tokenisation and special tokens.

It has about 500 tokens, with all 256 bytes, so it can encode any text. The words of the built-in toy task are single
tokens. Every digit and every operator between digits is a separate token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from cepo.microgeo.problems import ToyProblem
from lab.worlds.demonstrations import user_text
from lab.worlds.kinds import SHAPES, TaughtWorld

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VOCABULARY_SIZE = 500
_CORPUS_PROBLEMS = 2000
# Not used by the embedded problems: these words add tokens that shorten textbook geometry.
_GEOMETRY_WORDS = (
    " Find the area of the triangle. If m angle x and y, what is the measure of the segment? Round to the nearest tenth."
    " quadrilateral parallelogram trapezoid rhombus rectangle circle radius diameter tangent chord arc degree length line"
    " point parallel perpendicular bisector median altitude similar congruent ratio scale factor value figure necessary"
)

CHAT_TEMPLATE = """\
{%- macro part_text(part) -%}
{%- if part is string -%}{{ part }}
{%- elif part.type == 'image' or 'image' in part or 'image_url' in part -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' or 'video' in part -%}<|vision_start|><|video_pad|><|vision_end|>
{%- else -%}{{ part.text }}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content -%}{{- part_text(part) -}}{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def build_tokenizer(kind: TaughtWorld = SHAPES) -> Qwen2Tokenizer:
    """Trains the tokenizer on the built-in toy task's texts, which takes about a second and is deterministic."""
    from tokenizers import Tokenizer, models, trainers
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    qwen = Qwen2Tokenizer().backend_tokenizer
    trainable = Tokenizer(models.BPE())
    trainable.pre_tokenizer = qwen.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    trainable.train_from_iterator(_corpus(kind), trainer)
    trained = json.loads(trainable.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=[tuple(merge) for merge in trained["merges"]],  # type: ignore[arg-type]  # pairs are what it reads
        unk_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token not in ("<|endoftext|>", "<|im_end|>")],
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _corpus(kind: TaughtWorld) -> Iterable[str]:
    for index in range(_CORPUS_PROBLEMS):
        problem: ToyProblem = kind.generate(0, index, stream="tokenizer")
        yield user_text(problem.question)
        # The hint's line is a separate text, so that no merge joins its newline to the text before it. The
        # student's and the teachers' prompts then share all tokens up to that newline.
        yield user_text(problem.question, problem.answer).removeprefix(user_text(problem.question))
        yield "user\n"
        yield "assistant\n"
        yield kind.response(problem)
    yield _GEOMETRY_WORDS
