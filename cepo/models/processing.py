"""Tokenises prompts (chat template, image placeholders, pixels) and lists the tokens that are never sampled."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from PIL.Image import Image
from torch import Tensor

from cepo.config.worker_schema import ModelConfig
from cepo.errors import ConfigError, DataError
from cepo.files.safe_files import read_text
from cepo.files.trees import Fields, Tree
from cepo.models.families import family_of
from cepo.models.generation_prefix import prefilled_text
from cepo.models.interface import EncodedPrompt, ImageInputs, ImageReader, ImageSource, Turn, Video
from cepo.models.limited_process import ask
from cepo.models.patch_mask import PatchMask
from cepo.models.pretrained import read_config, unreadable
from cepo.models.text_codec import IMAGE_MARK, MARKS, TextCodec, encodable
from cepo.models.tokenizer_check import check_tokenizer

_TEXT_SLOT = "CEPO-TEXT-SLOT-"
SECONDS = 10.0
"""The processor time of one rendering, which normally takes about a millisecond."""
MOST_OWN_CHARACTERS = 1_000_000
"""The maximum number of characters that a template may add to the texts of a conversation."""


class Processing(TextCodec):
    """Combines the tokenizer, chat template and image processor of a model folder or hub name.

    Text from datasets or models never produces special tokens: `<|im_end|>` in a problem becomes plain characters.

    For `image_token_id`, `video_token_id` and `placeholders`, those of a whole image and a whole video, see
    `ImageReader`; they are None for what is not read. `arguments` make an equal object in another process.
    """

    def __init__(self, path: str, *, trust_remote_code: bool = False, chat_template: str | None = None) -> None:
        from transformers import AutoProcessor

        config: Any = read_config(path, trust_remote_code=trust_remote_code)
        self.family = family_of(config, trust_remote_code=trust_remote_code)
        with unreadable("worker.actor.model", path):
            check_tokenizer(path, trusted=trust_remote_code)
            self._processor: Any = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
        tokenizer: Any = getattr(self._processor, "tokenizer", self._processor)  # a text model's is the tokenizer
        eos_token_ids = _eos_token_ids(path, config, tokenizer, trust_remote_code)
        vocabulary_size: int = config.get_text_config().vocab_size
        super().__init__(tokenizer, eos_token_ids, vocabulary_size=vocabulary_size, name=path)
        self._num_embeddings = vocabulary_size
        self._path = path
        self.arguments: Tree = {"path": path, "trust_remote_code": trust_remote_code, "chat_template": chat_template}
        self._template = f"the chat template of worker.actor.model.model_path '{path}'"
        if chat_template is not None:
            self._processor.chat_template = chat_template
            self.tokenizer.chat_template = chat_template
            self._template = "the chat template in data.override_chat_template"
        with unreadable("worker.actor.model", path):
            reader = self.family.reader(self._processor, config)
        self.images: ImageReader | None = reader
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
            self.pad_token_id = self.eos_token_ids[0]
        self.in_vocabulary([self.pad_token_id, *self.eos_token_ids])

    @cached_property
    def prefilled(self) -> str:
        """The beginning of each response that the chat template writes itself, such as `<think>`; empty without one.

        It is in the prompt, so that the response as it was sampled lacks it.
        """
        texts: list[str] = []
        turns = [("user", "1"), ("assistant", "2"), ("user", "3")]
        messages: list[Fields] = []
        for role, text in turns:
            messages.append({"role": role, "content": self._content(text, (), texts)})
        slots = [f"{_TEXT_SLOT}{number:03d}" for number in range(len(turns))]
        try:
            rendered = self._rendered(messages)
        except (ConfigError, DataError):  # it takes no such conversation; a prompt that it refuses says so itself
            return ""
        if any(rendered.count(slot) != 1 for slot in slots):
            return ""
        before_earlier_answer = rendered.partition(slots[0])[2].partition(slots[1])[0]
        before_response = rendered.partition(slots[2])[2]
        special = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return prefilled_text(before_earlier_answer, before_response, special)

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """The tokens that are never sampled: control and vision tokens except end tokens, and ids without a token.

        A sampled placeholder without an image would make every later forward pass over the response fail. Embeddings
        are padded beyond the tokenizer's last id, and sampled ids in that range cannot be decoded.
        """
        banned: set[int] = set(self.tokenizer.all_special_ids)
        for token_id, token in self.tokenizer.added_tokens_decoder.items():
            if token.special:
                banned.add(token_id)
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

        Raises `ConfigError`: the chat template loses or repeats texts or placeholders; also see `_rendered`.
        """
        turns = [Turn(turn.role, encodable(turn.text)) for turn in (*history, Turn("user", text))]
        marks = MARKS if with_videos else (IMAGE_MARK,)
        in_pieces = self._ids_in_pieces(turns, marks)
        messages: list[Fields] = []
        for turn in turns:
            messages.append({"role": turn.role, "content": self._content(turn.text, marks)})
        rendered = self._rendered(messages)
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
                raise self._template_error(problem)
        return token_ids

    def _added_tokens(self, token_ids: Sequence[int]) -> list[int]:
        return [token for token in token_ids if token in self._added_token_ids]

    def _rendered(self, messages: Sequence[Fields]) -> str:
        """Returns the conversation as text that ends with the assistant header.

        Raises `ConfigError`: there is no template, it does not parse, or exceeds a limit of time, memory or length.
        Raises `DataError`: the template refuses the roles, their order, or the content.
        """
        template = self._processor.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if template is None:
            raise self._template_error("is missing")
        roles = "messages of the roles " + ", ".join(message["role"] for message in messages)
        request = {
            "messages": messages,
            "variables": {**self.tokenizer.special_tokens_map, "chat_template": template},
            "most_characters": MOST_OWN_CHARACTERS + len(str(messages)),
        }
        kind, value = ask("render", request, seconds=SECONDS)
        if kind == "text":
            return value
        if kind == "raised":
            raise DataError(f"{self._template} refuses {roles}: {value}")
        if kind == "ended" and value == -signal.SIGPROF:
            raise self._template_error(f"is not done with {roles} within {SECONDS:g} s of processor time")
        problems = {
            "unparsable": "does not parse: {}",
            "memory": "takes more than {} for " + roles,
            "characters": "makes {:,} characters of " + roles,
            "ended": "ends its process with code {} at " + roles,
        }
        raise self._template_error(problems[kind].format(value))

    def _template_error(self, what: str) -> ConfigError:
        return ConfigError(f"{self._template} {what}; name another template in data.override_chat_template")

    def _ids_in_pieces(self, turns: Sequence[Turn], marks: Sequence[str]) -> list[int]:
        """Tokenises the texts separately from the template, so that they cannot produce special tokens."""
        texts: list[str] = []
        messages: list[Fields] = []
        for turn in turns:
            content = self._content(turn.text, marks, texts)  # which adds to the texts
            messages.append({"role": turn.role, "content": content})
        rendered = self._rendered(messages)
        if rendered.count(_TEXT_SLOT) != len(texts):
            raise self._template_error("drops or repeats texts of a conversation")
        token_ids: list[int] = []
        for index, piece in enumerate(texts):
            head, slot, rendered = rendered.partition(f"{_TEXT_SLOT}{index:03d}")
            if not slot:
                raise self._template_error("changes or reorders the texts of a conversation")
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
                    content = f"{_TEXT_SLOT}{len(slots):03d}"
                    slots.append(piece)
                parts.append({"type": "text", "text": content})
        if self.images is None and len(pieces) == 1:
            return "".join(part["text"] for part in parts)  # text models' templates take a string
        return parts


def load_processing(model: ModelConfig, *, chat_template: str | None) -> Processing:
    """Loads a model's tokenizer and processor; the file `chat_template` replaces the model's own template."""
    return Processing(
        model.tokenizer_path or model.model_path,
        trust_remote_code=model.trust_remote_code,
        chat_template=None if chat_template is None else read_text(Path(chat_template)),
    )


def _eos_token_ids(path: str, config: Any, tokenizer: Any, trust_remote_code: bool) -> tuple[int, ...]:
    """Returns the tokens that end a response, from the generation config, if there is one, and the tokenizer."""
    from transformers import GenerationConfig

    with unreadable("worker.actor.model", path):
        try:
            declared = GenerationConfig.from_pretrained(path, trust_remote_code=trust_remote_code).eos_token_id
        except OSError:  # a checkpoint without generation_config.json
            declared = getattr(config, "eos_token_id", None)  # only some configurations declare it
    ids: list[int] = []
    if isinstance(declared, int):
        ids.append(declared)
    elif declared is not None:
        ids += declared
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ids:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise ConfigError(f"worker.actor.model.model_path '{path}' declares no token that ends a response")
    return tuple(ids)
