"""Defines what a model reads (turns, images, videos, prompts) and the interface of a family, which makes and encodes it."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy
import torch
from jaxtyping import Int64
from PIL import Image
from torch import Tensor, nn

from cepo.errors import DataError
from cepo.files.trees import Tree
from cepo.models.patch_mask import PatchMask, patch_size_of
from cepo.models.without_waiting import to_device

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
        distance = -(-len(self.frames) // most)  # rounded up
        return [Image.fromarray(frame) for frame in self.frames[::distance]]

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


@dataclass(frozen=True, kw_only=True)
class ImageSource:
    """The row of a dataset, named as in `data.train_files`, from which a prompt's images can be read again.

    `column` is None for the column `data.image_key`. With `mask` they are masked after they are read.
    """

    data: str
    row: int
    column: str | None = None
    mask: PatchMask | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageInputs:
    """The images and videos of a prompt, as the checkpoint's processor returns them; compared by identity.

    Attributes:
        tensors: arguments of the model's forward pass by name.
        expansions: for each placeholder of a whole image or video, the token ids that replace its first, second, ...
            occurrence.
        source: where the images can be read again, so that it can be sent instead of pixels; None if nowhere.
    """

    tensors: Mapping[str, Tensor] = field(repr=False)
    expansions: Mapping[int, Sequence[tuple[int, ...]]] = field(default_factory=dict, repr=False)
    source: ImageSource | None = None

    @property
    def grids(self) -> dict[str, Int64[Tensor, "units 3"]]:
        """The patches along time, height and width of each "image", and of each temporal patch of a "video".

        Empty if the processor does not return them. A temporal patch is encoded like an image, because the tower
        attends only within it.
        """
        grids: dict[str, Tensor] = {}
        images = self.tensors.get("image_grid_thw")
        if images is not None:
            grids["image"] = images
        videos = self.tensors.get("video_grid_thw")
        if videos is not None:
            num_temporal_patches = videos[:, 0]
            patches = videos.repeat_interleave(num_temporal_patches, dim=0)
            patches[:, 0] = 1  # each is one patch long in time
            grids["video"] = patches
        return grids

    @property
    def num_encoded(self) -> int:
        """The number of images and temporal patches that go through the vision tower."""
        if self.grids:
            return sum(len(grid) for grid in self.grids.values())
        return sum(len(expansions) for expansions in self.expansions.values())

    @cached_property
    def content_key(self) -> str:
        """A hash of the images' content, equal for equal images in all processes."""
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor in self.tensors.items():
            digest.update(f"{name}{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        digest.update(repr(self.expansions).encode())
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
    response = torch.arange(start, start + num_response_tokens).expand(3, -1)
    return torch.cat([context, response], dim=1)


@dataclass(frozen=True, kw_only=True)
class ImageFeatures:
    """The vision features of one unit, the smallest part of a prompt's images that is encoded separately.

    `embeddings`, (image tokens, H) or blocks that the model merges, replace those of the placeholders. `levels`, each
    (image tokens, H), are added after the first decoder layers; only some families have them. `kind` is "image" or,
    for a temporal patch of a video, "video".
    """

    embeddings: Tensor
    levels: tuple[Tensor, ...] = ()
    kind: str = "image"


@dataclass(frozen=True, kw_only=True)
class EngineUse:
    """The intended use of vLLM; `most_images` is the largest number of images in a prompt."""

    on_gpu: bool
    dtype: str
    with_adapter: bool
    most_images: int


REFUSALS = (ValueError, RuntimeError, ZeroDivisionError)
"""What processors raise for images that they do not accept."""


def refused(sizes: Sequence[tuple[int, int]], error: Exception) -> DataError:
    """Returns the error for images of these sizes, (width, height), that the model's processor refused with `error`."""
    listed = ", ".join(f"{width} x {height}" for width, height in sizes)
    return DataError(f"the model's processor refuses images of {listed} pixels ({error})")


class ImageReader:
    """Converts images and videos to tokens, tensors and positions by a checkpoint's own processor.

    Each image, with all of its tiles, is a unit (`ImageFeatures`), unless a derived class divides it.

    Attributes:
        image_token_id: the placeholder of one feature vector.
        placeholder_id: the placeholder of a whole image in a prompt for the rollout engine.
        video_token_id: the same for a video; None if no videos are read.
        patch_size: the side in pixels of the vision tower's patches.
        counts: names of what the processor returns for its own use and not for the model.
    """

    counts: ClassVar[tuple[str, ...]] = ()

    def __init__(self, family: Family, processor: Any, config: PreTrainedConfig) -> None:
        self._processor = processor
        self.image_token_id: int = config.image_token_id
        self.video_token_id: int | None = config.video_token_id if family.reads_videos else None
        self.placeholder_id: int = getattr(config, family.placeholder)
        self.patch_size = patch_size_of(config)
        self._tokens_of_size: dict[tuple[int, int], int] = {}

    def read(
        self, images: Sequence[Image.Image], source: ImageSource | None = None, videos: Sequence[Video] = ()
    ) -> ImageInputs:
        """Preprocesses a prompt's images, which were read from `source`, and videos; at least one of either.

        Raises DataError: the processor refuses the images, or the model reads no videos.
        """
        names: list[str] = list(self._processor.image_processor.model_input_names)
        arguments: Tree = {"return_tensors": "pt", "add_special_tokens": False}
        if images:
            arguments["images"] = [list(images)]
        if videos:
            names += self.video_processor.model_input_names
            arguments["videos"] = [video.frames for video in videos]
            arguments["video_metadata"] = [video.metadata() for video in videos]
            arguments["do_sample_frames"] = False
        placeholders: list[Any] = [self.placeholder_id] * len(images) + [self.video_token_id] * len(videos)
        tokenizer = self._processor.tokenizer
        # The processor replaces each placeholder; the end tokens between them separate the replacements.
        text = tokenizer.eos_token.join(tokenizer.convert_ids_to_tokens(placeholders))
        try:
            values = self._processor(text=[text], **arguments)
        except REFUSALS as error:
            sizes = [visual.size for visual in (*images, *videos)]
            raise refused(sizes, error) from error
        token_ids = values["input_ids"][0].tolist()
        expansions: dict[int, list[tuple[int, ...]]] = {}
        replacements = _split(token_ids, tokenizer.eos_token_id)
        for placeholder, expansion in zip(placeholders, replacements, strict=True):
            expansions.setdefault(placeholder, []).append(expansion)
        tensors: dict[str, Tensor] = {}
        for name in names:
            if name in values and name not in self.counts:
                tensors[name] = values[name]
        return ImageInputs(tensors=tensors, expansions=expansions, source=source)

    def read_masked(
        self,
        images: Sequence[Image.Image],
        mask: PatchMask,
        source: ImageSource | None = None,
        videos: Sequence[Video] = (),
    ) -> ImageInputs:
        """Preprocesses images and videos of which `mask` has blackened squares; a picture's tiles show the same ones."""
        films = [video.frames for video in videos]
        masked_images, masked_films = mask.masked(images, films, patch_size=mask.square or self.patch_size)
        masked_videos: list[Video] = []
        for video, frames in zip(videos, masked_films, strict=True):
            masked_videos.append(replace(video, frames=frames))
        return self.read(masked_images, source, masked_videos)

    def num_tokens(self, size: tuple[int, int]) -> int:
        """Returns the number of tokens that replace the placeholder of an image of (width, height) pixels.

        Each of several images in a prompt may have fewer tokens, but never more.
        """
        if size not in self._tokens_of_size:  # each count needs a call of the processor
            blank = self.read([Image.new("RGB", size)])
            (expansion,) = blank.expansions[self.placeholder_id]
            self._tokens_of_size[size] = len(expansion)
        return self._tokens_of_size[size]

    def num_video_tokens(self, video: Video) -> int:
        """Returns the number of tokens that replace a video's placeholder, including those of its frame times."""
        inputs = self.read((), videos=[video])
        (expansions,) = inputs.expansions.values()
        return len(expansions[0])

    @property
    def video_processor(self) -> Any:
        video_processor = getattr(self._processor, "video_processor", None)  # older folders have none
        if video_processor is None or self.video_token_id is None:
            raise DataError(
                "the row has videos, which are not supported for this model; docs/models.md lists the models that read videos"
            )
        return video_processor

    @property
    def video_factor(self) -> int:
        """The number of which a video's width and height must be multiples; DataError if no videos are read."""
        return self.video_processor.patch_size * self.video_processor.merge_size

    def expand(self, engine_ids: Sequence[int], images: ImageInputs) -> list[int]:
        """Replaces each placeholder of a whole image or video by what the processor writes for it."""
        remaining = {placeholder: iter(expansions) for placeholder, expansions in images.expansions.items()}
        expanded: list[int] = []
        for token in engine_ids:
            if token in remaining:
                expanded += next(remaining[token])
            else:
                expanded.append(token)
        return expanded

    def positions(self, token_ids: Sequence[int], images: ImageInputs) -> Int64[Tensor, "3 L"]:
        """Returns the position ids of an expanded context; families with one axis repeat it three times."""
        return torch.arange(len(token_ids)).expand(3, -1)

    def units_inside(self, token_ids: Sequence[int], images: ImageInputs, start: int, stop: int) -> list[int]:
        """Returns the units whose last placeholder is in [start, stop) of an expanded context."""
        tokens_per_unit = tokens_of_images(images, self.image_token_id)
        return units_ending_inside(token_ids, self.image_token_id, tokens_per_unit, start, stop)

    def smallest(self) -> tuple[tuple[int, ...], ImageInputs]:
        """Returns a small black image and its tokens, for passes that must run the tower without an image."""
        images = self.read([Image.new("RGB", (32, 32))])
        return images.expansions[self.placeholder_id][0], images


def tokens_of_images(images: ImageInputs, image_token_id: int) -> list[int]:
    """Returns the number of feature vectors of each image of a prompt, in their order."""
    (expansions,) = images.expansions.values()
    return [expansion.count(image_token_id) for expansion in expansions]


def units_ending_inside(
    token_ids: Sequence[int], placeholder: int, tokens_per_unit: Sequence[int], start: int, stop: int
) -> list[int]:
    """Returns which of a context's units, each of so many placeholders, have their last one in [start, stop)."""
    num_before = token_ids[:start].count(placeholder)
    num_until_stop = num_before + token_ids[start:stop].count(placeholder)
    units: list[int] = []
    for unit, end in enumerate(itertools.accumulate(tokens_per_unit)):
        if num_before < end <= num_until_stop:
            units.append(unit)
    return units


def _split(token_ids: Sequence[int], separator: int) -> list[tuple[int, ...]]:
    """Returns the tokens between the separators."""
    pieces: list[list[int]] = [[]]
    for token in token_ids:
        if token == separator:
            pieces.append([])
        else:
            pieces[-1].append(token)
    return [tuple(piece) for piece in pieces]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Describes a family of text models; base class of families with a vision tower.

    Attributes:
        title: its name in tables and messages.
        model_types: the `model_type` values in its checkpoints' config.json.
        reads_videos: whether a prompt may have videos in addition to images.
        sees_whole_images: whether an image's tokens attend to each other, also to later ones.
        has_experts: whether it is a mixture of experts. Experts are not linear layers, so LoRA adapts only the others.
        vision_modules: names under `model.model` of the modules that compute image features and nothing else.
        vision_parameters: names under `model.model` of other parameters on which the features depend.
        processors: starts of the names of transformers' classes that read its images and videos.
        placeholder: the configuration's entry for the placeholder of a whole image in a prompt for the rollout engine.
        why_padded: the reason why rows cannot be packed; empty if they can, given full causal attention in every layer.
        num_position_axes: 3 with M-RoPE (time, height, width), else 1.
        image_reader: the reader of its images.
        attention: transformers' attention implementation, or one for each part of the configuration ("" for the whole).
    """

    title: str
    model_types: tuple[str, ...]
    reads_videos: bool = False
    sees_whole_images: bool = False
    has_experts: bool = False
    vision_modules: tuple[str, ...] = ()
    vision_parameters: tuple[str, ...] = ()
    processors: tuple[str, ...] = ()
    placeholder: str = "image_token_id"
    why_padded: ClassVar[str] = ""
    num_position_axes: ClassVar[int] = 1
    image_reader: ClassVar[type[ImageReader]] = ImageReader
    attention: ClassVar[str | Mapping[str, str]] = "sdpa"

    @property
    def packs(self) -> bool:
        return not self.why_padded

    @property
    def reads_images(self) -> bool:
        return bool(self.vision_modules)

    def of(self, config: PreTrainedConfig) -> Family:
        """Returns the family with what differs between its models, read from a model's configuration."""
        return self

    def reader(self, processor: Any, config: PreTrainedConfig) -> ImageReader | None:
        """Returns the image reader; None for text models and for folders without an image processor."""
        if not self.reads_images or getattr(processor, "image_processor", None) is None:
            return None
        return self.image_reader(self, processor, config)

    def placeholder_id(self, config: PreTrainedConfig) -> int | None:
        """Returns the placeholder of a whole image in a prompt for the rollout engine; None for text models."""
        return getattr(config, self.placeholder, None)

    def token_inputs(self, input_ids: Int64[Tensor, "R L"], config: PreTrainedConfig) -> dict[str, Tensor]:
        """Returns further keyword arguments of the forward pass that depend only on the tokens."""
        return {}

    def features(self, model: Any, images: Sequence[ImageInputs], device: torch.device) -> list[list[ImageFeatures]]:
        """Computes the features of each prompt's units on `device`.

        The images of a prompt are encoded in a separate pass, so that none depends on another prompt's padding.
        """
        features: list[list[ImageFeatures]] = []
        for image_inputs in images:
            inputs = {name: to_device(tensor, device) for name, tensor in image_inputs.tensors.items()}
            output = model.model.get_image_features(**inputs, return_dict=True)
            embeddings = output.pooler_output
            if not isinstance(embeddings, Tensor):  # images differ in their number of tokens
                embeddings = torch.cat(list(embeddings))
            # (tokens, H), or (tiles, tokens per tile, H)
            tokens_per_entry = 1 if embeddings.dim() == 2 else embeddings.shape[1]
            entries: list[int] = []  # of each image
            for num_tokens in tokens_of_images(image_inputs, model.config.image_token_id):
                entries.append(num_tokens // tokens_per_entry)
            features.append([ImageFeatures(embeddings=part) for part in embeddings.split(entries)])
        return features

    def feature_inputs(self, features: Sequence[ImageFeatures]) -> dict[str, object]:
        """Returns the forward pass's arguments for units in placeholder order."""
        embeddings = torch.cat([unit.embeddings for unit in features])
        return {"mm_encoder_outputs": {"image": SimpleNamespace(pooler_output=embeddings)}}

    def why_not_vllm(self, use: EngineUse) -> str | None:
        """Returns why vLLM cannot sample this family with the trainer's log-probs; None if it can."""
        # vLLM's attention on a CPU is causal even within an image, which changes log-probs by 0.1 nats.
        if self.sees_whole_images and use.most_images and not use.on_gpu:
            return "vLLM on a CPU masks later tokens of the same image, to which this model attends"
        # vLLM's CPU build computes adapters of experts with kernels that need a GPU.
        if self.has_experts and use.with_adapter and not use.on_gpu:
            return "vLLM serves experts with an adapter only on GPUs"
        return None

    def published(self, name: str, weight: Tensor) -> tuple[str, Tensor]:
        """Converts a weight of transformers' model to its name and shape in published checkpoints and in vLLM."""
        return name, weight

    def vision_parts(self, model: Any) -> list[nn.Module]:
        """Returns the modules that compute image features."""
        return [model.model.get_submodule(name) for name in self.vision_modules]

    def vision_weights(self, model: Any) -> list[nn.Parameter]:
        """Returns the parameters on which image features depend, including the projection to the language model."""
        weights: list[nn.Parameter] = []
        for part in self.vision_parts(model):
            weights += part.parameters()
        for name in self.vision_parameters:
            weights.append(model.model.get_parameter(name))
        return weights

    @property
    def vision_pattern(self) -> str:
        """A regular expression that matches the full name of each module in the vision parts, within any wrapper."""
        names = "|".join(self.vision_modules)
        if len(self.vision_modules) == 1:
            return f".*{names}.*"
        return f".*(?:{names}).*"
