"""From text and pictures to tokens: chat template, image placeholders, pixels, and which tokens may never be sampled."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from cepo.errors import ConfigError, DataError
from cepo.models.turns import Turn

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from cepo.models.videos import Video

IMAGE_MARK, VIDEO_MARK = "<image>", "<video>"
"""Stand in a dataset's text where a picture or a video belongs, as in EasyR1."""
MARKS = (IMAGE_MARK, VIDEO_MARK)
_TEXT_SLOT = "CEPO-TEXT-SLOT-{:03d}"


@dataclass(frozen=True, kw_only=True)
class PictureSource:
    """Where a prompt's pictures can be read again: a data set as `data.train_files` names it, and the row in it."""

    data: str
    row: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageInputs:
    """A prompt's pictures as the vision tower takes them; compared by identity.

    A video is a row of pictures, one per temporal patch: the tower attends within each of them alone. They stand behind the
    prompt's own pictures.

    Attributes:
        pixel_values: (patches, channels x temporal patch x patch x patch), float32.
        grid_thw: (pictures, 3), patches along time, height and width.
        frame_times: for each video the seconds of its temporal patches.
        source: where the same pictures can be read, so that a handle travels in place of pixels; None if nowhere.
    """

    pixel_values: Tensor = field(repr=False)
    grid_thw: Tensor
    source: PictureSource | None = None
    frame_times: tuple[tuple[float, ...], ...] = ()

    @property
    def num_pictures(self) -> int:
        """Pictures that are no part of a video."""
        return len(self.grid_thw) - sum(map(len, self.frame_times))

    @property
    def is_frame(self) -> tuple[bool, ...]:
        """For each row of the grid whether it is part of a video."""
        return tuple(number >= self.num_pictures for number in range(len(self.grid_thw)))

    def model_inputs(self) -> dict[str, Tensor]:
        """The keyword arguments of a transformers model's forward pass; a video's grid is one row per temporal patch."""
        num_patches = int(self.grid_thw[: self.num_pictures].prod(dim=1).sum())
        inputs: dict[str, Tensor] = {}
        if self.num_pictures:
            inputs["pixel_values"] = self.pixel_values[:num_patches]
            inputs["image_grid_thw"] = self.grid_thw[: self.num_pictures]
        if self.frame_times:
            inputs["pixel_values_videos"] = self.pixel_values[num_patches:]
            inputs["video_grid_thw"] = self.grid_thw[self.num_pictures :]
        return inputs

    @cached_property
    def content_key(self) -> str:
        """Equal exactly where the pictures are, also in another process."""
        digest = hashlib.blake2b(self.grid_thw.contiguous().numpy().tobytes(), digest_size=16)
        digest.update(self.pixel_values.contiguous().numpy().tobytes())
        digest.update(repr(self.frame_times).encode())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A user turn with the assistant header behind it.

    Attributes:
        token_ids: with one placeholder per image token, as the trained model reads it.
        engine_ids: with one placeholder per picture and per video, as the rollout engine reads it.
        images: None for text alone.
    """

    token_ids: tuple[int, ...]
    engine_ids: tuple[int, ...]
    images: ImageInputs | None


class Processing:
    """A model folder's (or hub name's) tokenizer, chat template and image processor.

    Text that people or models wrote is tokenised apart from the template, with special tokens switched off, so that
    `<|im_end|>` in a problem or a reference stays eight harmless characters.

    Raises:
        ConfigError: no tokenizer can be loaded, or the chat template loses the text it is given.
    """

    def __init__(self, path: str, *, trust_remote_code: bool = False, chat_template: str | None = None) -> None:
        from transformers import AutoConfig, AutoProcessor

        try:
            self._processor: Any = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
            config: Any = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"worker.actor.model.model_path '{path}': no model can be read there ({error}); "
                "give a folder with a Hugging Face checkpoint, or a hub name where a hub can be reached"
            ) from error
        self.tokenizer: Any = getattr(self._processor, "tokenizer", self._processor)
        self.image_processor: Any = getattr(self._processor, "image_processor", None)
        self.video_processor: Any = getattr(self._processor, "video_processor", None)
        if chat_template is not None:
            self._processor.chat_template = chat_template
            self.tokenizer.chat_template = chat_template
        self._vocabulary_size: int = getattr(config, "text_config", config).vocab_size
        self.image_token_id: int | None = getattr(config, "image_token_id", None)
        self.video_token_id: int | None = getattr(config, "video_token_id", None)
        self._around_a_frame = (
            getattr(config, "vision_start_token_id", None),
            getattr(config, "vision_end_token_id", None),
        )
        self.merge_size: int = getattr(self.image_processor, "merge_size", 1)
        self.eos_token_ids = _eos_token_ids(path, config, self.tokenizer, trust_remote_code)
        self.pad_token_id: int = (
            self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.eos_token_ids[0]
        )

    @property
    def fingerprint(self) -> str:
        """A hash of what decides a prompt's tokens: vocabulary, chat template, and how pictures are cut."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        parts = (
            type(self.tokenizer).__name__,
            str(sorted(self.tokenizer.get_vocab().items())) if backend is None else backend.to_str(),
            str(self.special_texts),
            str(getattr(self._processor, "chat_template", None)),
            str(self.tokenizer.chat_template),
            "" if self.image_processor is None else self.image_processor.to_json_string(),
            "" if self.video_processor is None else self.video_processor.to_json_string(),
        )
        return hashlib.sha256("\0".join(parts).encode("utf-8", errors="surrogatepass")).hexdigest()

    @property
    def special_texts(self) -> tuple[str, ...]:
        """Every added token's text and the dataset's own marks: what a reference may not contain."""
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values()]
        return (*added, *MARKS)

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """Control and vision tokens except those that end a response, and ids that no token has.

        A sampled placeholder without a picture makes every later forward pass over the response fail. Embeddings are padded
        beyond the tokenizer's last id, and what is sampled there cannot be decoded.
        """
        special = {index for index, token in self.tokenizer.added_tokens_decoder.items() if token.special} | set(
            self.tokenizer.all_special_ids
        )
        unused = set(range(max(self.tokenizer.get_vocab().values()) + 1, self._vocabulary_size))
        return tuple(sorted((special | unused) - set(self.eos_token_ids)))

    def load_images(self, images: Sequence[Image], source: PictureSource | None = None) -> ImageInputs | None:
        """Pixels and grid of a prompt's pictures, with the place they were read from; None for none."""
        if not images:
            return None
        values = self._picture_reader(images=list(images), return_tensors="pt")
        return ImageInputs(pixel_values=values["pixel_values"], grid_thw=values["image_grid_thw"], source=source)

    def load_visuals(
        self, images: Sequence[Image], videos: Sequence[Video], source: PictureSource | None = None
    ) -> ImageInputs | None:
        """Pixels and grids of a prompt's pictures and videos; None for neither. `source` is that of pictures alone."""
        pictures = self.load_images(images, source)
        if not videos:
            return pictures
        import torch

        values = self._video_reader(
            videos=[video.frames for video in videos],
            video_metadata=[video.metadata() for video in videos],
            do_sample_frames=False,
            return_tensors="pt",
        )
        grids = values["video_grid_thw"].repeat_interleave(values["video_grid_thw"][:, 0], dim=0)
        grids[:, 0] = 1
        pixels = values["pixel_values_videos"]
        return ImageInputs(
            pixel_values=pixels if pictures is None else torch.cat([pictures.pixel_values, pixels]),
            grid_thw=grids if pictures is None else torch.cat([pictures.grid_thw, grids]),
            frame_times=tuple(video.times(self._video_reader.temporal_patch_size) for video in videos),
        )

    @property
    def video_factor(self) -> int:
        """The sides of a video's frames are multiples of it."""
        return self._video_reader.patch_size * self._video_reader.merge_size

    def num_video_tokens(self, video: Video) -> int:
        """Tokens a video takes, those of its times included, without touching its pixels."""
        width, height = video.size
        times = video.times(self._video_reader.temporal_patch_size)
        patches = self._video_reader.get_num_of_video_patches(len(video.frames), height, width, {})
        around = sum(len(self.encode_text(_time_text(time))) + len(self._around_a_frame) for time in times)
        return int(patches) // self.merge_size**2 + around

    @property
    def _video_reader(self) -> Any:
        if self.video_processor is None or self.video_token_id is None or None in self._around_a_frame:
            raise DataError("the row has videos, but the model reads none: its folder has no video processor")
        return self.video_processor

    @property
    def _picture_reader(self) -> Any:
        if self.image_processor is None:
            raise DataError("the row has pictures, but the model's folder has no image processor: it reads text only")
        return self.image_processor

    def num_image_tokens(self, size: tuple[int, int]) -> int:
        """Tokens a picture of (width, height) pixels takes, without touching its pixels."""
        width, height = size
        patches = self._picture_reader.get_number_of_image_patches(height, width, {})
        return int(patches) // self.merge_size**2

    def encode(
        self,
        text: str,
        images: ImageInputs | None,
        *,
        history: Sequence[Turn] = (),
        assistant_prefix: str = "",
    ) -> EncodedPrompt:
        """Tokens of the user turn `text` (one `<image>` per picture, one `<video>` per video) and of the assistant header.

        `history` stands before that turn; `assistant_prefix` is put behind the header, right before the response.
        """
        with_videos = images is not None and bool(images.frame_times)
        engine_ids = self.template_ids(text, with_videos=with_videos, history=history)
        prefix = self.encode_text(assistant_prefix)
        expanded = self.expand(engine_ids, images)
        return EncodedPrompt(token_ids=(*expanded, *prefix), engine_ids=(*engine_ids, *prefix), images=images)

    def expand(self, engine_ids: Sequence[int], images: ImageInputs | None) -> list[int]:
        """One placeholder per image token in place of one per picture; for a video, in each frame, behind the frame's time."""
        if images is None:
            return list(engine_ids)
        counts = [int(grid.prod()) // self.merge_size**2 for grid in images.grid_thw]
        pictures, frames = iter(counts[: images.num_pictures]), iter(counts[images.num_pictures :])
        videos = iter(images.frame_times)
        start, end = self._around_a_frame
        expanded: list[int] = []
        for token in engine_ids:
            if token == self.image_token_id:
                expanded += [token] * next(pictures)
            elif token == self.video_token_id:
                for time in next(videos):
                    assert start is not None and end is not None, "videos are read for models that have these tokens"
                    expanded += [*self.encode_text(_time_text(time)), start, *[token] * next(frames), end]
            else:
                expanded.append(token)
        return expanded

    def template_ids(self, text: str, *, with_videos: bool = False, history: Sequence[Turn] = ()) -> list[int]:
        """The templated turns of `history` and the user's with the assistant header, one placeholder token per `<image>`.

        `<video>` is a placeholder too where there are videos, and else plain text.

        Raises:
            DataError: the model's template refuses the roles or their order.
        """
        messages: list[dict[str, Any]] = []
        texts: list[str] = []
        for turn in (*history, Turn("user", text)):
            parts = self._content(turn.text, MARKS if with_videos else (IMAGE_MARK,), texts)
            messages.append({"role": turn.role, "content": parts})
        try:
            rendered: str = self._processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(f"the chat template refuses messages of the roles {roles}: {error}") from error
        token_ids: list[int] = []
        for index, piece in enumerate(texts):
            head, slot, rendered = rendered.partition(_TEXT_SLOT.format(index))
            if not slot:
                raise ConfigError("the chat template does not show the user's text; check data.override_chat_template")
            token_ids += self.tokenizer(head, add_special_tokens=False)["input_ids"]
            token_ids += self.encode_text(piece)
        return token_ids + self.tokenizer(rendered, add_special_tokens=False)["input_ids"]

    def encode_text(self, text: str) -> list[int]:
        """Tokens of plain text, in which no special token can arise."""
        if not text:
            return []
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`, as written by the model."""
        return self.tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token by itself, for pictures of credit."""
        return [self.decode([token], skip_special_tokens=False) for token in token_ids]

    def save(self, folder: Path) -> None:
        """Writes tokenizer, template and processor files."""
        self._processor.save_pretrained(folder)

    def _content(self, text: str, marks: Sequence[str], texts: list[str]) -> Any:
        """A message's content with slots in place of its texts, which are put behind those of the messages before."""
        pieces = re.split(f"({'|'.join(marks)})", text)
        parts: list[dict[str, str]] = []
        for piece in pieces:
            if piece in marks:
                parts.append({"type": piece.strip("<>")})
            elif piece:
                parts.append({"type": "text", "text": _TEXT_SLOT.format(len(texts))})
                texts.append(piece)
        if self.image_processor is None and len(pieces) == 1:
            return "".join(part["text"] for part in parts)  # templates of text models take a string
        return parts


def _time_text(seconds: float) -> str:
    """What Qwen3-VL reads before a frame."""
    return f"<{seconds:.1f} seconds>"


def _eos_token_ids(path: str, config: Any, tokenizer: Any, trust_remote_code: bool) -> tuple[int, ...]:
    """Tokens that end a response: the generation config's where there is one, with the tokenizer's own."""
    from transformers import GenerationConfig

    try:
        declared = GenerationConfig.from_pretrained(path, trust_remote_code=trust_remote_code).eos_token_id
    except OSError:  # a checkpoint without generation_config.json
        declared = getattr(config, "eos_token_id", None)
    ids = [declared] if isinstance(declared, int) else list(declared or [])
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ids:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise ConfigError(f"worker.actor.model.model_path '{path}' declares no token that ends a response")
    return tuple(ids)
