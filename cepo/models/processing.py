"""Tokenises prompts (chat template, image placeholders, pixels) and lists the tokens that are never sampled."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from PIL.Image import Image
from torch import Tensor

from cepo.config.schema import RunConfig
from cepo.config.worker_schema import ModelConfig
from cepo.errors import ConfigError, DataError
from cepo.files.safe_files import read_text
from cepo.files.trees import Fields, Tree
from cepo.models.chat_template import ChatTemplate, Message, marks_thought, num_slots, slot
from cepo.models.families import family_of
from cepo.models.folder_check import require_reading_files
from cepo.models.interface import EncodedPrompt, ImageInputs, ImageReader, ImageSource, Turn, Video
from cepo.models.patch_mask import PatchMask
from cepo.models.pretrained import read_config, unreadable
from cepo.models.response_end import SAMPLED_HERE, declared_ends, response_end, warn_of_undeclared_end
from cepo.models.text_codec import IMAGE_MARK, MARKS, TextCodec, encodable


class Processing(TextCodec):
    """Combines the tokenizer, chat template and image processor of a model folder or hub name.

    Text from datasets or models never produces special tokens: `<|im_end|>` in a problem becomes plain characters. What
    the chat template writes after an assistant's text ends a response, and so do the tokens that the files declare.

    For `image_token_id`, `video_token_id` and `placeholders`, those of a whole image and a whole video, see
    `ImageReader`; they are None for what is not read. `arguments` make an equal object in another process.
    """

    def __init__(
        self,
        path: str,
        *,
        trust_remote_code: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Fields | None = None,
    ) -> None:
        from transformers import AutoProcessor

        config: Any = read_config(path, trust_remote_code=trust_remote_code)
        self.family = family_of(config)
        with unreadable("worker.actor.model", path):
            if Path(path).is_dir() and not trust_remote_code:
                require_reading_files(Path(path), of_images=self.family.reads_images)
            # A Mistral folder may have a second tokenizer, which lacks what is read here.
            options = {"mistral_format": False} if (Path(path) / "tekken.json").exists() else {}
            self._processor: Any = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code, **options)
            tokenizer: Any = getattr(self._processor, "tokenizer", self._processor)  # a text model's is the tokenizer
            reader = self.family.reader(self._processor, config)
            self._declared_ends = declared_ends(path, config, tokenizer, trust_remote_code=trust_remote_code)
            vocabulary_size = int(config.get_text_config().vocab_size)
        self._num_embeddings = vocabulary_size
        self._path = path
        self.arguments: Tree = {
            "path": path,
            "trust_remote_code": trust_remote_code,
            "chat_template": chat_template,
            "chat_template_kwargs": dict(chat_template_kwargs or {}),
        }
        template_name = f"the chat template of worker.actor.model.model_path '{path}'"
        if chat_template is not None:
            self._processor.chat_template = chat_template
            tokenizer.chat_template = chat_template
            template_name = "the chat template in data.override_chat_template"
        self.template = ChatTemplate(
            self._processor.chat_template or tokenizer.chat_template,  # base models' processors may have none
            template_name,
            special_tokens=tokenizer.special_tokens_map,
            settings=chat_template_kwargs,
        )
        self.template.require_read(chat_template_kwargs or {})
        self.images: ImageReader | None = reader
        end = response_end(self.template, tokenizer, self._declared_ends, as_parts=reader is not None)
        if not end.token_ids and not end.text:
            raise ConfigError(f"worker.actor.model.model_path '{path}' declares no token that ends a response")
        super().__init__(tokenizer, end, vocabulary_size=vocabulary_size, name=path)
        self.image_token_id: int | None = None
        self.video_token_id: int | None = None
        self.placeholders: tuple[int | None, int | None] = (None, None)
        if reader is not None:
            self.image_token_id = reader.image_token_id
            self.video_token_id = reader.video_token_id
            self.placeholders = (reader.placeholder_id, reader.video_token_id)
        self._added_token_ids = frozenset(self.tokenizer.added_tokens_decoder)
        self.pad_token_id: int = self.tokenizer.pad_token_id
        if self.tokenizer.pad_token_id is None:
            self.pad_token_id = next(iter(self.eos_token_ids), 0)
        self.in_vocabulary([self.pad_token_id, *self.eos_token_ids])

    @cached_property
    def prefilled(self) -> str:
        """The beginning of each response that the chat template writes itself, such as `<think>`; empty without one.

        It is in the prompt, so that the response as it was sampled lacks it.
        """
        controls = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return self.template.prefilled(controls, as_parts=self.images is not None)

    def warn_of_undeclared_end(self) -> None:
        """Logs a warning if the chat template ends an assistant's turn by what the model's files do not declare."""
        warn_of_undeclared_end(self.end, self._declared_ends, self.template.name, self.tokenizer, SAMPLED_HERE)

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """The tokens that are never sampled: control and vision tokens but ends and thoughts, and ids without a token.

        A sampled placeholder without an image would make every later forward pass over the response fail. Embeddings
        are padded beyond the tokenizer's last id, and sampled ids in that range cannot be decoded.
        """
        banned: set[int] = set(self.tokenizer.all_special_ids)
        for token_id, token in self.tokenizer.added_tokens_decoder.items():
            if token.special:
                banned.add(token_id)
            if marks_thought(token.content):
                banned.discard(token_id)
        for visual_token in (self.image_token_id, self.video_token_id, *self.placeholders):
            if visual_token is not None:
                banned.add(visual_token)
        largest = max(self.tokenizer.get_vocab().values())
        banned.update(range(largest + 1, self._num_embeddings))
        banned.difference_update(self.eos_token_ids)
        # A tokenizer may have tokens beyond the embeddings, which cannot be sampled.
        return tuple(sorted(token_id for token_id in banned if token_id < self._num_embeddings))

    def load_images(
        self, images: Sequence[Image], source: ImageSource | None = None, videos: Sequence[Video] = ()
    ) -> ImageInputs | None:
        """Preprocesses a prompt's images, which were read from `source`, and videos. Returns None without either."""
        if not images and not videos:
            return None
        return self.reader.read(images, source, videos)

    def load_masked(
        self, images: Sequence[Image], mask: PatchMask, source: ImageSource | None = None, videos: Sequence[Video] = ()
    ) -> ImageInputs:
        """Preprocesses images and videos with black patches, as `mask` says.

        `source` is where the images without the mask were read. At least one image or video is needed.
        """
        if source is not None:
            source = replace(source, mask=mask)
        return self.reader.read_masked(images, mask, source, videos)

    @property
    def reader(self) -> ImageReader:
        """The image reader; raises DataError if the model does not read images."""
        if self.images is None:
            raise DataError("the row has images, but the model's folder has no image processor: it reads text only")
        return self.images

    def encode(
        self, text: str, images: ImageInputs | None, *, history: Sequence[Turn] = (), assistant_prefix: str = ""
    ) -> EncodedPrompt:
        """Tokenises `history`, the user turn `text` with its marks, the assistant header and `assistant_prefix`."""
        with_videos = images is not None and self.video_token_id in images.expansions
        engine_ids = self.template_ids(text, with_videos=with_videos, history=history)
        prefix = self.encode_text(assistant_prefix)
        token_ids = self.expand(engine_ids, images)
        return EncodedPrompt(
            token_ids=(*token_ids, *prefix),
            engine_ids=(*engine_ids, *prefix),
            images=images,
        )

    def expand(self, engine_ids: Sequence[int], images: ImageInputs | None) -> list[int]:
        if images is None:
            return list(engine_ids)
        return self.reader.expand(engine_ids, images)

    def positions(self, context: EncodedPrompt) -> Int64[Tensor, "3 L"]:
        """Returns the position ids of a context's tokens; families with one axis repeat it three times."""
        if context.images is None:
            return torch.arange(len(context.token_ids)).expand(3, -1)
        return self.reader.positions(context.token_ids, context.images)

    def template_ids(self, text: str, *, with_videos: bool = False, history: Sequence[Turn] = ()) -> list[int]:
        """Renders `history`, the user turn and the assistant header to tokens, with one placeholder per `<image>`.

        `<video>` is a placeholder if there are videos, else plain text. The rendered conversation is tokenised as a
        whole, as in the model's training, unless that would turn text of a turn into a special token.

        Raises `ConfigError`: the chat template loses or repeats texts or placeholders; also see `ChatTemplate.render`.
        """
        turns = [Turn(turn.role, encodable(turn.text)) for turn in (*history, Turn("user", text))]
        marks = MARKS if with_videos else (IMAGE_MARK,)
        in_pieces = self._ids_in_pieces(turns, marks)
        messages: list[Message] = []
        for turn in turns:
            messages.append({"role": turn.role, "content": self._content(turn.text, marks)})
        rendered = self.template.render(messages)
        token_ids: list[int] = self.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        if self._added_tokens(token_ids) != self._added_tokens(in_pieces):
            token_ids = in_pieces
        self.in_vocabulary(token_ids)
        for mark, placeholder in zip(marks, self.placeholders, strict=False):
            if placeholder is None:
                continue
            num_marks = sum(turn.text.count(mark) for turn in turns)
            num_placeholders = token_ids.count(placeholder)
            if num_placeholders != num_marks:
                problem = f"writes {num_placeholders} placeholders for {num_marks} {mark} in a conversation"
                raise self.template.error(problem)
        return token_ids

    def _added_tokens(self, token_ids: Sequence[int]) -> list[int]:
        return [token for token in token_ids if token in self._added_token_ids]

    def _ids_in_pieces(self, turns: Sequence[Turn], marks: Sequence[str]) -> list[int]:
        """Tokenises the texts separately from the template, so that they cannot produce special tokens."""
        texts: list[str] = []
        messages: list[Message] = []
        for turn in turns:
            content = self._content(turn.text, marks, texts)  # which adds to the texts
            messages.append({"role": turn.role, "content": content})
        rendered = self.template.render(messages)
        if num_slots(rendered) != len(texts):
            raise self.template.error("drops or repeats texts of a conversation")
        token_ids: list[int] = []
        for index, piece in enumerate(texts):
            head, separator, rendered = rendered.partition(slot(index))
            if not separator:
                raise self.template.error("changes or reorders the texts of a conversation")
            token_ids += self.tokenizer(head, add_special_tokens=False)["input_ids"]
            token_ids += self.encode_text(piece)
        return token_ids + self.tokenizer(rendered, add_special_tokens=False)["input_ids"]

    def save(self, folder: Path) -> None:
        """Writes tokenizer, template and processor files; raises `ConfigError` if their content does not allow it."""
        try:
            self._processor.save_pretrained(folder)
        except (TypeError, ValueError) as error:  # for example, a template whose name is a path
            raise ConfigError(f"tokenizer and processor of {self._path} cannot be written: {error}") from error

    def _content(self, text: str, marks: Sequence[str], slots: list[str] | None = None) -> Any:
        """Returns a message's content. With `slots`, texts are moved there and replaced by their slots' names."""
        pieces = re.split(f"({'|'.join(marks)})", text) if marks else [text]
        parts: list[dict[str, str]] = []
        for piece in pieces:
            if piece in marks:
                parts.append({"type": piece.strip("<>")})
            elif piece:
                content = piece
                if slots is not None:
                    content = slot(len(slots))
                    slots.append(piece)
                parts.append({"type": "text", "text": content})
        if self.images is None and len(pieces) == 1:
            return "".join(part["text"] for part in parts)  # text models' templates take a string
        return parts


def load_processing(
    model: ModelConfig, *, chat_template: str | None, chat_template_kwargs: Fields | None = None
) -> Processing:
    """Loads a model's tokenizer and processor; the file `chat_template` replaces the model's own template.

    A warning names what ends a response by the template alone.
    """
    processing = Processing(
        model.tokenizer_path or model.model_path,
        trust_remote_code=model.trust_remote_code,
        chat_template=None if chat_template is None else read_text(Path(chat_template)),
        chat_template_kwargs=chat_template_kwargs,
    )
    processing.warn_of_undeclared_end()
    return processing


def processing_of(config: RunConfig) -> Processing:
    """Loads tokenizer and processor of a run's policy, with the chat template and its variables in `data`."""
    return load_processing(
        config.worker.actor.model,
        chat_template=config.data.override_chat_template,
        chat_template_kwargs=config.data.chat_template_kwargs,
    )
