"""Tokenizers of a few hundred tokens with each family's own class and special tokens."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

_QWEN = "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|>"
_QWEN_IMAGES = "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
QWEN_TOKENS = (*_QWEN.split(), *_QWEN_IMAGES.split())
QWEN_TEXT_TOKENS = QWEN_TOKENS[:3]
_INTERNVL = "<img> </img> <IMG_CONTEXT> <quad> </quad> <ref> </ref> <box> </box> <video>"
INTERNVL_TOKENS = (*QWEN_TOKENS, *_INTERNVL.split())
LLAVA_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
ROWS_AND_COLUMNS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
_IMAGE_TOKENS = ("<fake_token_around_image>", "<image>", "<end_of_utterance>")
SMOLVLM_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<global-img>", *ROWS_AND_COLUMNS, *_IMAGE_TOKENS)
_LLAMA = "<|begin_of_text|> <|end_of_text|> <|finetune_right_pad_id|> <|start_header_id|> <|end_header_id|> <|eot_id|>"
IDEFICS3_TOKENS = (*_LLAMA.split(), *_IMAGE_TOKENS, "<global-img>", *ROWS_AND_COLUMNS)
_GLM = "<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> <|observation|> <|image|> <|video|>"
_GLM_MARKS = tuple(f"<|{side}_of_{kind}|>" for kind in ("image", "video") for side in ("begin", "end"))
GLM_TOKENS = (*_GLM.split(), *_GLM_MARKS)
_LFM_ROWS = tuple(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5))
_LFM = "<|pad|> <|startoftext|> <|endoftext|> <|im_start|> <|im_end|> <image> <|image_start|> <|image_end|> <|img_thumbnail|>"
LFM_TOKENS = (*_LFM.split(), *_LFM_ROWS)
_GEMMA_PIECES = 640


def byte_level_tokenizer(
    special_tokens: tuple[str, ...],
    *,
    end: str = "<|im_end|>",
    pad: str = "<|endoftext|>",
    unknown: str | None = "<|endoftext|>",
    begin: str | None = None,
    kind: str = "Qwen2Tokenizer",
    named: dict[str, str] | None = None,
) -> Any:
    """The built-in toy task's byte-level BPE with all `special_tokens` behind its pieces.

    `kind` is the class that the family's real checkpoints name; `named` are the tokenizer's attributes for one token each.
    """
    import transformers

    pieces, merges = _byte_level_pieces()
    used = {end, pad, unknown, begin, *(named or {}).values()}
    options: dict[str, Any] = {
        "unk_token": unknown,
        "bos_token": begin,
        "eos_token": end,
        "pad_token": pad,
        "extra_special_tokens": dict(named or {}),
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    vocabulary: Any = {"vocab": dict(pieces), "merges": list(merges)}
    if kind == "PreTrainedTokenizerFast":
        unnamed: Any = dict.fromkeys(("unk_token", "bos_token", "eos_token"))
        vocabulary = {"tokenizer_object": transformers.GPT2Tokenizer(**vocabulary, **unnamed).backend_tokenizer}
    options |= vocabulary
    tokenizer = getattr(transformers, kind)(**options)
    _add_special(tokenizer, [token for token in special_tokens if token not in used])
    return tokenizer


GEMMA3_MARKS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
GEMMA4_MARKS = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"}
GEMMA4_MARKS |= {"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"}


def gemma_tokenizer(
    marks: dict[str, str] = GEMMA3_MARKS, turns: tuple[str, str] = ("<start_of_turn>", "<end_of_turn>")
) -> Any:
    """A BPE with byte fallback whose spaces are `▁`, one token for up to four newlines, and Gemma's special tokens."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import GemmaTokenizer

    from cepo.microgeo.problems import generate_problem

    named = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    fixed = [*named, *turns, marks["boi_token"], marks["eoi_token"]]
    trainable = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    trainable.normalizer = normalizers.Replace(" ", "▁")
    trainable.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    trainer = trainers.BpeTrainer(
        vocab_size=_GEMMA_PIECES,
        special_tokens=[*fixed, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    words = [generate_problem(0, index, stream="tokenizer").question + "\n" for index in range(200)]
    trainable.train_from_iterator(words, trainer)
    trained = json.loads(trainable.to_str())["model"]
    merges = [tuple(merge) for merge in trained["merges"]]
    for first, second in (("\n", "\n"), ("\n\n", "\n"), ("\n\n", "\n\n")):
        merges.append((first, second))
        trained["vocab"].setdefault(first + second, len(trained["vocab"]))
    tokenizer = GemmaTokenizer(
        vocab=trained["vocab"],
        merges=merges,  # type: ignore[arg-type]  # pairs are what it reads
        extra_special_tokens=marks,
        add_bos_token=True,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    _add_special(tokenizer, list(turns))
    return tokenizer


def _add_special(tokenizer: Any, texts: list[str]) -> None:
    from tokenizers import AddedToken

    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in texts], special_tokens=True)


@cache
def _byte_level_pieces() -> tuple[dict[str, int], tuple[tuple[str, str], ...]]:
    """Pieces with their ids, and merges, of the built-in toy task's tokenizer."""
    from testing.toy_checkpoint import toy_tokenizer

    trained = json.loads(toy_tokenizer().backend_tokenizer.to_str())["model"]
    return trained["vocab"], tuple((first, second) for first, second in trained["merges"])
