"""A tiny checkpoint with what SmolLM2 has and other tiny ones lack together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_checkpoints import write_checkpoint

TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML with a default system turn."""


def write_smollm_like(folder: Path) -> Path:
    """Writes a model with tied embeddings, a default system turn, and one token that pads and ends a response."""
    from transformers import AutoTokenizer

    write_checkpoint("qwen3", folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    return folder
