"""Defines what a model reads (turns, images, videos, prompts) and the interface of a family, which makes and encodes it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy
import torch
from jaxtyping import Int64
from PIL import Image
from torch import Tensor, nn

from cepo.errors import DataError
from cepo.trees import Tree

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Turn:
    """One message: `role` is system, user or assistant; `text` has an `<image>` per image and a `<video>` per video."""

    role: str
    text: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Video:
    """Frames sampled from a video file: (frames, height, width, 3) uint8, an even number in RGB.

    `frame_numbers` are their 0-based indices in the source, which has `num_source_frames`.
    """

    frames: numpy.ndarray = field(repr=False)
    frame_numbers: tuple[int, ...]
    source_fps: float
    num_source_frames: int

    @property
    def size(self) -> tuple[int, int]:
        _, height, width, _ = self.frames.shape
        return width, height

    def some_frames(self, most: int = 4) -> list[Image.Image]:
        """Returns at most `most` evenly spaced frames as images, starting with the first."""
        return [Image.fromarray(frame) for frame in self.frames[:: -(-len(self.frames) // most)]]

    def metadata(self) -> Tree:
        """Returns what the processors of transformers and vLLM need with the frames."""
        width, height = self.size
        return {
            "fps": self.source_fps,
            "total_num_frames": self.num_source_frames,
            "duration": self.num_source_frames / self.source_fps,
            "frames_indices": list(self.frame_numbers),
            "width": width,
            "height": height,
            "video_backend": "pyav",
        }

    def times(self, temporal_patch_size: int) -> tuple[float, ...]:
        """Returns each temporal patch's time in seconds: the mean of its first and last frame's times.

        Copies of the last frame fill an incomplete last patch.
        """
        missing = -len(self.frame_numbers) % temporal_patch_size
        seconds = [number / self.source_fps for number in (*self.frame_numbers, *self.frame_numbers[-1:] * missing)]
        first, last = seconds[::temporal_patch_size], seconds[temporal_patch_size - 1 :: temporal_patch_size]
        return tuple((one + other) / 2 for one, other in zip(first, last, strict=True))


@dataclass(frozen=True, kw_only=True)
class ImageSource:
    """The row of a dataset, named as in `data.train_files`, from which a prompt's images can be read again.

    `column` is None for the column `data.image_key`.
    """

    data: str
    row: int
    column: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageInputs:
    """The images of a prompt as inputs of the vision tower; compared by identity.

    Families with a patch grid treat each image separately. A video is then a sequence of images, one per temporal
    patch, because the tower attends only within each patch; these follow the prompt's own images. Other families keep
    all images of a prompt together, as their processor returns them.

    Attributes:
        pixel_values: with a grid (patches, channels x temporal patch x patch x patch), float32; else as processed.
        grid_thw: (images, 3), patches along time, height and width; None without a grid.
        frame_times: for each video the times of its temporal patches in seconds.
        source: where the images can be read again, so that it can be sent instead of pixels; None if nowhere.
        more_tensors: without a grid the vision tower's further inputs, by the processor's names.
        expansions: without a grid the token ids that replace each image's placeholder.
    """

    pixel_values: Tensor = field(repr=False)
    grid_thw: Tensor | None = None
    source: ImageSource | None = None
    frame_times: tuple[tuple[float, ...], ...] = ()
    more_tensors: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    expansions: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    @property
    def grid(self) -> Tensor:
        assert self.grid_thw is not None, "these images are known together, not by a grid"
        return self.grid_thw

    @property
    def num_units(self) -> int:
        """The number of units with separate features: images and temporal patches with a grid, else 1 per prompt."""
        return 1 if self.grid_thw is None else len(self.grid_thw)

    @property
    def num_encoded(self) -> int:
        """The number of images and temporal patches that go through the vision tower."""
        return len(self.expansions) if self.grid_thw is None else len(self.grid_thw)

    @property
    def num_images(self) -> int:
        """The number of images that do not belong to a video."""
        return self.num_encoded - sum(map(len, self.frame_times))

    @property
    def is_frame(self) -> tuple[bool, ...]:
        """Whether each unit belongs to a video."""
        return tuple(number >= self.num_images for number in range(self.num_units))

    @cached_property
    def content_key(self) -> str:
        """A hash of the images' content, equal for equal images in all processes."""
        digest = hashlib.blake2b(digest_size=16)
        grid = {} if self.grid_thw is None else {"grid_thw": self.grid_thw}
        for name, tensor in (grid | dict(self.more_tensors) | {"pixel_values": self.pixel_values}).items():
            digest.update(f"{name}{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        digest.update(repr((self.frame_times, self.expansions)).encode())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A tokenised prompt that ends with the assistant header.

    `token_ids`, the trained model's input, have a placeholder per image token; `engine_ids`, the rollout engine's, one
    per image and per video. `teacher_images` are what teachers see instead of `images`; None if they see the same.
    """

    token_ids: tuple[int, ...]
    engine_ids: tuple[int, ...]
    images: ImageInputs | None
    teacher_images: ImageInputs | None = None


def sequence_positions(context: Int64[Tensor, "3 C"], num_response_tokens: int) -> Int64[Tensor, "3 L"]:
    """Appends the response's positions, which continue after the context's largest position on all axes."""
    start = int(context.max()) + 1
    return torch.cat([context, torch.arange(start, start + num_response_tokens).expand(3, -1)], dim=1)


EncodeText = Callable[[str], list[int]]


@dataclass(frozen=True, kw_only=True)
class ImageFeatures:
    """The vision features of one unit (`ImageInputs.num_units`), as inputs of the language model.

    `embeddings`, (image tokens, H) or blocks that the model merges, replace those of the placeholders. `levels`, each
    (image tokens, H), are added after the first decoder layers; only some families have them.
    """

    embeddings: Tensor
    levels: tuple[Tensor, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EngineUse:
    """The intended use of vLLM; `most_images` is the largest number of images in a prompt."""

    on_gpu: bool
    dtype: str
    with_adapter: bool
    most_images: int


class ImageReader(ABC):
    """Converts images to tokens, tensors and positions, for one checkpoint's processor and configuration.

    Attributes:
        image_token_id: the placeholder of one feature vector.
        placeholder_id: the placeholder of a whole image in a prompt for the rollout engine.
        video_token_id: the same for a video; None if no videos are read.
    """

    def __init__(self, family: Family, processor: Any, config: PreTrainedConfig, encode_text: EncodeText) -> None:
        self.image_token_id: int = config.image_token_id
        self.video_token_id: int | None = config.video_token_id if family.reads_videos else None
        # Older folders have no video processor.
        self._videos: Any = getattr(processor, "video_processor", None) if family.reads_videos else None
        self.placeholder_id = family.placeholder_id(config)

    @abstractmethod
    def read(
        self, images: Sequence[Image.Image], source: ImageSource | None = None, videos: Sequence[Video] = ()
    ) -> ImageInputs:
        """Preprocesses a prompt's images, which were read from `source`, and videos; at least one of either."""

    @abstractmethod
    def num_tokens(self, size: tuple[int, int]) -> int:
        """Returns the number of tokens that replace the placeholder of an image of (width, height) pixels."""

    def num_video_tokens(self, video: Video) -> int:
        """Returns the number of tokens that replace a video's placeholder, including those of its frame times."""
        raise NotImplementedError

    @property
    def video_processor(self) -> Any:
        if self._videos is None:
            raise DataError(
                "the row has videos, which are not supported for this model; docs/models.md lists the models that read videos"
            )
        return self._videos

    @property
    def video_factor(self) -> int:
        """The number of which a video's width and height must be multiples; DataError if no videos are read."""
        return self.video_processor.patch_size * self.video_processor.merge_size

    @abstractmethod
    def expand(self, engine_ids: Sequence[int], images: ImageInputs) -> list[int]:
        """Replaces an image's placeholder by one per image token, and a video's by its frames, each after its time."""

    @abstractmethod
    def positions(self, token_ids: Sequence[int], images: ImageInputs) -> Int64[Tensor, "3 L"]:
        """Returns the position ids of an expanded context; families with one axis repeat it three times."""

    @abstractmethod
    def units_inside(self, token_ids: Sequence[int], images: ImageInputs, start: int, stop: int) -> list[int]:
        """Returns the units whose last placeholder is in [start, stop) of an expanded context."""

    @abstractmethod
    def smallest(self) -> tuple[tuple[int, ...], ImageInputs]:
        """Returns a black image with as few tokens as possible, for passes that must run the tower without an image."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Describes a family of text models; base class of families with a vision tower.

    Attributes:
        title: its name in tables and messages.
        model_types: the `model_type` values in its checkpoints' config.json.
        reads_videos: whether a prompt may have videos in addition to images.
        fused_decoding: whether the transformers generator can fuse the decoder's layers (`cepo.models.fused_decoding`).
        has_experts: whether it is a mixture of experts. Experts are not linear layers, so LoRA adapts only the others.
        vision_modules: names under `model.model` of the modules that compute image features and nothing else.
        vision_parameters: names under `model.model` of other parameters on which the features depend.
        placeholder: the configuration's entry for the placeholder of a whole image in a prompt for the rollout engine.
        why_padded: the reason why rows cannot be packed; empty if they can, given full causal attention in every layer.
        num_position_axes: 3 with M-RoPE (time, height, width), else 1.
        image_reader: the reader of its images.
    """

    title: str
    model_types: tuple[str, ...]
    reads_videos: bool = False
    fused_decoding: bool = False
    has_experts: bool = False
    vision_modules: tuple[str, ...] = ()
    vision_parameters: tuple[str, ...] = ()
    placeholder: str = "image_token_id"
    why_padded: ClassVar[str] = ""
    num_position_axes: ClassVar[int] = 1
    image_reader: ClassVar[type[ImageReader]]

    @property
    def packs(self) -> bool:
        return not self.why_padded

    @property
    def reads_images(self) -> bool:
        return bool(self.vision_modules)

    def reader(self, processor: Any, config: PreTrainedConfig, encode_text: EncodeText) -> ImageReader | None:
        """Returns the image reader; None for text models and for folders without an image processor."""
        reads = self.reads_images and getattr(processor, "image_processor", None) is not None
        return self.image_reader(self, processor, config, encode_text) if reads else None

    def placeholder_id(self, config: PreTrainedConfig) -> int | None:
        """Returns the placeholder of a whole image in a prompt for the rollout engine; None for text models."""
        return getattr(config, self.placeholder, None)

    def model_inputs(self, images: ImageInputs) -> dict[str, Tensor]:
        """Returns a prompt's images as keyword arguments of the model's forward pass."""
        raise NotImplementedError

    def token_inputs(self, input_ids: Int64[Tensor, "R L"], config: PreTrainedConfig) -> dict[str, Tensor]:
        """Returns further keyword arguments of the forward pass that depend only on the tokens."""
        return {}

    def features(self, model: Any, images: Sequence[ImageInputs], device: torch.device) -> list[list[ImageFeatures]]:
        """Computes the features of each prompt's units on `device`."""
        raise NotImplementedError

    def feature_inputs(self, features: Sequence[ImageFeatures], is_frame: Sequence[bool]) -> dict[str, object]:
        """Returns the forward pass's arguments for units in placeholder order; `is_frame` marks video frames."""
        joined = SimpleNamespace(pooler_output=torch.cat([one.embeddings for one in features]))
        return {"mm_encoder_outputs": {"image": joined}}

    def why_not_vllm(self, use: EngineUse) -> str | None:
        """Returns why vLLM cannot sample this family with the trainer's log-probs; None if it can."""
        # vLLM's CPU build computes adapters of experts with kernels that need a GPU.
        unserved = self.has_experts and use.with_adapter and not use.on_gpu
        return "vLLM serves experts with an adapter only on GPUs" if unserved else None

    def published(self, name: str, weight: Tensor) -> tuple[str, Tensor]:
        """Converts a weight of transformers' model to its name and shape in published checkpoints and in vLLM."""
        return name, weight

    def vision_parts(self, model: Any) -> list[nn.Module]:
        """Returns the modules that compute image features."""
        return [model.model.get_submodule(name) for name in self.vision_modules]

    def vision_weights(self, model: Any) -> list[nn.Parameter]:
        """Returns the parameters on which image features depend, including the projection to the language model."""
        inside = [weight for part in self.vision_parts(model) for weight in part.parameters()]
        return [*inside, *(model.model.get_parameter(name) for name in self.vision_parameters)]

    @property
    def vision_pattern(self) -> str:
        """A regular expression that matches the full name of each module in the vision parts, within any wrapper."""
        names = "|".join(self.vision_modules)
        return f".*{names}.*" if len(self.vision_modules) == 1 else f".*(?:{names}).*"
