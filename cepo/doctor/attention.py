"""Which attention kernels serve a GPU, as a function of its compute capability alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

Capability = tuple[int, int]

CHOSEN = "sdpa"
"""What `cepo.models.pretrained` loads every trained model with."""


@dataclass(frozen=True, kw_only=True)
class AttentionSupport:
    """What serves cards of one architecture.

    Attributes:
        architecture: its name.
        cards: examples of cards.
        sdpa: kernels of torch's scaled_dot_product_attention for causal bf16 attention without a mask, in the order in
            which torch 2.13 tries them.
        flash_attention_2: what the package flash-attn 2 offers there. Nothing here needs it.
        vllm: backends of vLLM 0.32 for a decoder, in its order; the first one whose libraries are installed runs.
        why: the reason for the choice of `CHOSEN`.
        untested: True where this package never ran on such a card, and the table is from the libraries' sources alone.
    """

    architecture: str
    cards: str
    sdpa: tuple[str, ...]
    flash_attention_2: str
    vllm: tuple[str, ...]
    why: str
    untested: bool

    chosen: str = CHOSEN


_FUSED = ("flash", "memory-efficient", "math")
_CUDNN_FIRST = ("cuDNN", *_FUSED)
_VLLM = ("FLASH_ATTN (FA2)", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")
_VLLM_HOPPER = ("FLASH_ATTN (FA3)", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")
_VLLM_SM100 = ("FLASHINFER", "FLASH_ATTN (FA4)", "TRITON_ATTN", "FLEX_ATTENTION")
_WHY_FLASH = (
    "SDPA's own flash kernel is compiled into torch's wheels for it, so that flash-attn would add a build, not speed"
)
_WHY_CUDNN = "SDPA takes cuDNN's kernel, written for it, and flash-attn 2 has none that is"
_WHY_SM120 = (
    "SDPA's flash kernel is compiled for sm_120 into torch's CUDA 13 wheels; flash-attn 2 has to be built from source, "
    "and the kernels of Hopper and of sm_100 (FA3, FA4) do not run here"
)
_PREBUILT = "runs; needs a wheel for exactly this torch, else a build from source"
_FROM_SOURCE = "from source with CUDA 12.8 or later; Ampere's kernels"


def _row(
    architecture: str,
    cards: str,
    why: str,
    *,
    sdpa: tuple[str, ...] = _FUSED,
    flash_attention_2: str = _PREBUILT,
    vllm: tuple[str, ...] = _VLLM,
) -> AttentionSupport:
    return AttentionSupport(
        architecture=architecture,
        cards=cards,
        sdpa=sdpa,
        flash_attention_2=flash_attention_2,
        vllm=vllm,
        why=why,
        untested=True,
    )


ATTENTION: dict[Capability, AttentionSupport] = {
    (8, 0): _row("Ampere", "A100, A30", _WHY_FLASH),
    (8, 6): _row("Ampere", "RTX 3090, A40, A10", _WHY_FLASH),
    (8, 9): _row("Ada", "RTX 4090, L40S, L4", _WHY_FLASH),
    (9, 0): _row("Hopper", "H100, H200", _WHY_CUDNN, sdpa=_CUDNN_FIRST, vllm=_VLLM_HOPPER),
    (10, 0): _row(
        "Blackwell (sm_100)",
        "B200, GB200",
        _WHY_CUDNN,
        sdpa=_CUDNN_FIRST,
        flash_attention_2=_FROM_SOURCE,
        vllm=_VLLM_SM100,
    ),
    (12, 0): _row(
        "Blackwell (sm_120)",
        "RTX PRO 6000, RTX 5090",
        _WHY_SM120,
        flash_attention_2=_FROM_SOURCE,
    ),
}
"""By compute capability. See docs/gpus.md for where each entry is from."""


def attention_lines() -> list[str]:
    """The table as Markdown, for docs/gpus.md."""
    lines = [
        "| capability | architecture | cards | chosen | SDPA, in order | FlashAttention 2 | vLLM, in order | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (major, minor), row in ATTENTION.items():
        cells = [
            f"{major}.{minor}",
            row.architecture,
            row.cards,
            f"`{row.chosen}`",
            ", ".join(row.sdpa),
            row.flash_attention_2,
            ", ".join(row.vllm),
            "untested" if row.untested else "tested",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def attention_for(capability: Capability) -> AttentionSupport | None:
    """What serves a card: the entry of its capability, else of the highest lower one with the same major number.

    Code compiled for sm_XY runs on sm_XZ with Z >= Y. None for an architecture that is not in the table.
    """
    lower = [known for known in ATTENTION if known[0] == capability[0] and known[1] <= capability[1]]
    return ATTENTION[max(lower)] if lower else None


def wheel_serves(capability: Capability, compiled: Sequence[str]) -> bool:
    """Whether a build whose `torch.cuda.get_arch_list()` is `compiled` has code that runs on the card.

    `sm_XY` is machine code: it runs on the same major number from Y on; with a letter behind it, on XY alone. `compute_XY` is
    PTX, which the driver translates for every later card.
    """
    for entry in compiled:
        matched = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", entry)
        if matched is None:
            continue
        kind, major, minor, letter = matched.groups()
        built = (int(major), int(minor))
        if letter:
            runs = built == capability
        elif kind == "sm":
            runs = built[0] == capability[0] and built[1] <= capability[1]
        else:
            runs = built <= capability
        if runs:
            return True
    return False
