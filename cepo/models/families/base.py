"""The contract of a model family: everything that the trainer has to know about an architecture beyond what all share.

A family is found by the checkpoint's `model_type` (`cepo.models.families.family_of`). It says how images become tokens and
positions, which modules make their features, whether rows may share tokens in packed form, and what LoRA leaves alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from cepo.errors import DataError
from cepo.models.inputs import ImageInputs, ImageSource

if TYPE_CHECKING:
    import torch
    from jaxtyping import Int64
    from PIL.Image import Image
    from torch import Tensor, nn

    from cepo.models.inputs import Video

EncodeText = Callable[[str], list[int]]
"""Tokens of plain text, in which no special token can arise."""


@dataclass(frozen=True, kw_only=True)
class ImageFeatures:
    """What the language model takes of one unit (`ImageInputs.num_units`).

    Attributes:
        embeddings: in place of the placeholders' embeddings; (image tokens, H), or the blocks that the model's own merging
            wants, whose first axes together are the image tokens.
        levels: (image tokens, H) each, added behind the first decoder layers; only some families have them.
    """

    embeddings: Tensor
    levels: tuple[Tensor, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EngineUse:
    """How vLLM would be used.

    Attributes:
        on_gpu: whether it is the build for GPUs.
        dtype: "bf16", "fp16" or "fp32".
        with_adapter: whether it gets LoRA adapters.
        most_images: the most images of a prompt.
    """

    on_gpu: bool
    dtype: str
    with_adapter: bool
    most_images: int


class ImageReader(ABC):
    """Images as tokens, tensors and positions, for one checkpoint's processor and configuration.

    Attributes:
        image_token_id: stands where a feature vector goes.
        placeholder_id: stands for a whole image in a prompt to the rollout engine.
        video_token_id: the same for a video; None where no videos are read.
    """

    image_token_id: int
    placeholder_id: int
    video_token_id: int | None = None

    @abstractmethod
    def read(self, images: Sequence[Image], source: ImageSource | None = None) -> ImageInputs:
        """The tensors of a prompt's images, at least one, with the place they were read from."""

    def read_visuals(self, images: Sequence[Image], videos: Sequence[Video], source: ImageSource | None) -> ImageInputs:
        """The tensors of images and at least one video; `source` is that of the images alone.

        Raises:
            DataError: the family reads no videos.
        """
        raise DataError("the row has videos, but the model reads none")

    @abstractmethod
    def num_tokens(self, size: tuple[int, int]) -> int:
        """Tokens that replace the placeholder of an image of (width, height) pixels."""

    def num_video_tokens(self, video: Video) -> int:
        """The same for a video, those of its times included.

        Raises:
            DataError: the family reads no videos.
        """
        raise DataError("the row has videos, but the model reads none")

    @property
    def video_factor(self) -> int:
        """The sides of a video's frames are multiples of it.

        Raises:
            DataError: the family reads no videos.
        """
        raise DataError("the row has videos, but the model reads none")

    @abstractmethod
    def expand(self, engine_ids: Sequence[int], images: ImageInputs) -> list[int]:
        """What the trained model reads, with each placeholder replaced."""

    @abstractmethod
    def positions(self, token_ids: Sequence[int], images: ImageInputs) -> Int64[Tensor, "3 L"]:
        """Position ids of an expanded context; families with one axis have it three times."""

    @abstractmethod
    def units_inside(self, token_ids: Sequence[int], images: ImageInputs, start: int, stop: int) -> list[int]:
        """Indices of the units whose tokens stand in [start, stop) of an expanded context."""

    @abstractmethod
    def smallest(self) -> tuple[tuple[int, ...], ImageInputs]:
        """A black image of as few tokens as can be, for passes that must run through the vision tower without an image."""


class Family:
    """A family of text models, and what the families with a vision tower replace.

    Attributes:
        title: how tables and messages call it.
        model_types: of the checkpoints' config.json.
        packs: whether rows may share tokens in packed form, where each layer is full causal attention.
        why_padded: the reason, where `packs` is False.
        reads_videos: whether a prompt may have videos beside images.
        num_position_axes: 3 with M-RoPE (time, height, width), else 1.
        fused_decoding: whether the transformers generator knows the decoder's layers (`cepo.models.fused_decoding`).
        vision_modules: below `model.model`; they make an image's features and nothing else.
        vision_parameters: below `model.model`, outside of modules; the features depend on them too.
    """

    title: ClassVar[str]
    model_types: ClassVar[tuple[str, ...]]
    packs: ClassVar[bool] = True
    why_padded: ClassVar[str] = ""
    reads_videos: ClassVar[bool] = False
    num_position_axes: ClassVar[int] = 1
    fused_decoding: ClassVar[bool] = False
    vision_modules: ClassVar[tuple[str, ...]] = ()
    vision_parameters: ClassVar[tuple[str, ...]] = ()

    @property
    def reads_images(self) -> bool:
        """Whether the family has a vision tower."""
        return bool(self.vision_modules)

    def reader(self, processor: Any, config: Any, encode_text: EncodeText) -> ImageReader | None:
        """The reader of images for a loaded processor; None for text models."""
        return None

    def placeholders(self, config: Any) -> tuple[int | None, int | None]:
        """The token ids that stand for a whole image and a whole video in a prompt to the rollout engine."""
        return None, None

    def model_inputs(self, images: ImageInputs) -> dict[str, Tensor]:
        """A prompt's images as keyword arguments of the model's own forward pass."""
        raise NotImplementedError

    def token_inputs(self, input_ids: Int64[Tensor, "R L"], config: Any) -> dict[str, Tensor]:
        """Further keyword arguments of the forward pass that follow from the tokens alone."""
        return {}

    def features(self, model: Any, images: Sequence[ImageInputs], device: torch.device) -> list[list[ImageFeatures]]:
        """For each prompt's images the features of its units, computed on `device`."""
        raise NotImplementedError

    def feature_inputs(self, features: Sequence[ImageFeatures], is_frame: Sequence[bool]) -> dict[str, Any]:
        """The forward pass's keyword arguments for units in the order of their placeholders.

        `is_frame` tells those that are part of a video, which have placeholders of their own.
        """
        joined = SimpleNamespace(pooler_output=_concatenated([one.embeddings for one in features]))
        return {"mm_encoder_outputs": {"image": joined}}

    def why_not_vllm(self, use: EngineUse) -> str | None:
        """Why vLLM cannot sample from this family, or not what the trainer would score; None where it can."""
        return None

    def published(self, name: str, weight: Tensor) -> tuple[str, Tensor]:
        """A weight of transformers' model under the name and in the form of published checkpoints, which vLLM reads too."""
        return name, weight

    def vision_parts(self, model: Any) -> list[nn.Module]:
        """The modules that make an image's features; none for a text model."""
        return [model.model.get_submodule(name) for name in self.vision_modules]

    def loose_parameters(self, model: Any) -> list[nn.Parameter]:
        """Parameters outside of `vision_parts` that an image's features depend on."""
        return [model.model.get_parameter(name) for name in self.vision_parameters]

    @property
    def vision_pattern(self) -> str:
        """A regular expression for the whole name of each module inside the vision parts, under whatever wrapper."""
        names = "|".join(self.vision_modules)
        return f".*{names}.*" if len(self.vision_modules) == 1 else f".*(?:{names}).*"


def experts_unserved(use: EngineUse) -> str | None:
    """Why vLLM cannot serve a mixture of experts: beside an adapter its CPU build takes kernels that need a GPU."""
    return "vLLM serves experts beside an adapter on GPUs alone" if use.with_adapter and not use.on_gpu else None


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    import torch

    return torch.cat(list(parts))
