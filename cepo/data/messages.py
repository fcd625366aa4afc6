"""Reads conversations and lists of images in the forms that public data sets have.

CSV files, and data sets that went through one, have them as texts: JSON, or what Python shows. Those are read, or refused by
what they are, and never taken for a question.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import unquote

from cepo.data.json_text import read_literal
from cepo.errors import DataError
from cepo.files.trees import Fields, is_list, is_mapping
from cepo.models.interface import Turn
from cepo.models.text_codec import IMAGE_MARK, VIDEO_MARK

ROLES = ("system", "user", "assistant")
_LLAVA_ROLES = {"human": "user", "gpt": "assistant"} | {role: role for role in ROLES}
"""The roles of messages in LLaVA's form, `{from, value}`."""
_ACCEPTED = "accepted: a list of messages {role, content} or {from, value}, of which the last is the user's"
_PARTS = {
    "text": "text", "input_text": "text",
    "image": "image", "image_url": "image", "input_image": "image",
    "video": "video", "video_url": "video", "input_video": "video",
}  # fmt: skip
"""The types of a message's parts in the forms of Qwen and OpenAI, and what they stand for."""
_CONTENT_KEYS = {
    "text": ("text",),
    "image": ("image", "image_url", "url", "path", "bytes", "base64"),
    "video": ("video", "video_url", "url", "path", "bytes"),
}
"""The keys that can hold the content of a part, by what it is."""
_HINTS = ("type", "detail")
"""Keys of a part that say nothing about its content."""
_WRITTEN = re.compile(r"""[\s\\\ufeff]*\w*[\[({"']""")
"""The beginning of a list, a mapping, a text or bytes as JSON or Python writes them, behind a byte order mark too."""
_QUOTE = r"""(?:["']|&(?:amp;)?(?:quot|apos|#34|#39|#x22|#x27);)"""
"""A quotation mark, as it is or as HTML escapes it."""
_HAS_ROLE = re.compile(rf"""{_QUOTE}(?:role|from)(?:\\|{_QUOTE})+\s*:""")
_HAS_CONTENT = re.compile(rf"""{_QUOTE}(?:content|value|text)(?:\\|{_QUOTE})+\s*:""")
_NOTHING = ("null", "None")


@dataclass(frozen=True)
class Conversation:
    """The turns of a prompt, of which the last is the user's.

    `images` has an entry for each `<image>` in the turns' texts, in order: the image that the message itself holds, or
    None for the next one of the row's images. `videos` is alike.
    """

    turns: list[Turn]
    images: list[object]
    videos: list[object]


def read_conversation(messages: object) -> Conversation:
    """Reads a list of messages, `{role, content}` or LLaVA's `{from: human|gpt|system, value}`.

    A message's content is text or a list of parts: `{type: text, text: ...}`, `{type: image}` and `{type: video}`, which
    stand for the row's next image or video, or parts that hold one: `{type: image, image: path}`, `{image: path}`,
    `{type: image_url, image_url: {url: ...}}`. Anything else raises `DataError`.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise DataError(f"the prompt has no message; {_ACCEPTED}")
    conversation = Conversation([], [], [])
    for number, message in enumerate(cast("Sequence[object]", messages)):
        role, parts = _role_and_parts(message, number)
        texts: list[str] = []
        for part in parts:
            kind, content = _part(part, number)
            if kind == "text":
                texts.append(cast(str, content))
                conversation.images.extend([None] * texts[-1].count(IMAGE_MARK))
                conversation.videos.extend([None] * texts[-1].count(VIDEO_MARK))
            elif kind == "image":
                texts.append(IMAGE_MARK)
                conversation.images.append(content)
            else:
                texts.append(VIDEO_MARK)
                conversation.videos.append(content)
        conversation.turns.append(Turn(role, "".join(texts)))
    if conversation.turns[-1].role != "user":
        raise DataError(f"the last message is the {conversation.turns[-1].role}'s; {_ACCEPTED}")
    return conversation


def split_answer(messages: object, key: str) -> tuple[list[object], str]:
    """Returns the messages before the last one, and the text of that one: the assistant's answer.

    Raises `DataError` if the column `key` has no such messages.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise DataError(
            f"column '{key}' is both data.prompt_key and data.answer_key, so it must hold messages, of which the last is the "
            f"assistant's; it holds a {type(cast(object, messages)).__name__}"
        )
    *earlier, last = cast("Sequence[object]", messages)
    role, parts = _role_and_parts(last, len(earlier))
    contents = [_part(part, len(earlier)) for part in parts]
    texts = [str(content) for kind, content in contents if kind == "text"]
    if role != "assistant" or len(texts) < len(parts):
        raise DataError(
            f"column '{key}' is both data.prompt_key and data.answer_key, so its last message must be the assistant's answer; "
            f"it is the {role}'s. Accepted: parts of text alone"
        )
    return earlier, "".join(texts)


def _role_and_parts(message: object, number: int) -> tuple[str, Sequence[object]]:
    fields: Fields = message if is_mapping(message) else {}
    role = fields.get("role")
    content = fields.get("content")
    known: Mapping[str, str] = {name: name for name in ROLES}
    if role is None and fields.get("from") is not None:
        role = fields["from"]
        content = fields.get("value")
        known = _LLAVA_ROLES
    if isinstance(content, str):
        content = _parts_in(content)
    if role is None or not isinstance(content, str | list | tuple):
        raise DataError(f"message {number} has no role or no content of text or parts: {message!r:.200}; {_ACCEPTED}")
    if not isinstance(role, str) or role not in known:
        raise DataError(f"message {number} has the role {role!r:.100}; accepted: {', '.join(known)}")
    if isinstance(content, str):
        return known[role], [{"type": "text", "text": content}]
    return known[role], cast("Sequence[object]", content)


def _part(part: object, number: int) -> tuple[str, object]:
    """Returns what a part of a message is, text, image or video, and its content, which is None for the row's next one."""
    fields: Fields = {}
    if is_mapping(part):
        fields = {key: value for key, value in part.items() if value is not None}
    label = fields.get("type", next((key for key in _PARTS if key in fields), None))
    kind = _PARTS.get(label) if isinstance(label, str) else None
    if kind is not None:
        content_keys = _CONTENT_KEYS[kind]
        contents = [fields[key] for key in content_keys if key in fields]
        has_only_known_keys = set(fields) <= {*content_keys, *_HINTS}
        if has_only_known_keys and len(contents) <= 1:
            if kind == "text" and contents and isinstance(contents[0], str):
                return kind, contents[0]
            if kind != "text" and (contents or label in ("image", "video")):
                return kind, media_value(contents[0], kind) if contents else None
    raise DataError(
        f"message {number} has the part {str(fields or part)[:200]}; accepted: {{type: text, text: ...}}, {{type: image}} and "
        "{type: video}, whose images and videos stand in the row's columns data.image_key and data.video_key, or parts "
        "that hold them: {type: image, image: PATH}, {type: image_url, image_url: {url: ADDRESS}}"
    )


def media_value(value: object, kind: str = "image") -> object:
    """Returns what an entry of a row's images or videos holds: bytes, text (a path, an address, base64), or `{bytes, path}`.

    Takes it out of `{image: ...}`, `{image_url: {url: ...}}` and the like, and the path out of `file://PATH`. Raises
    `DataError` for a mapping that has nothing of the kind.
    """
    if value is None:
        raise DataError(f"an entry of the {kind}s is null; accepted: bytes, a path, or {{bytes, path}}")
    if is_mapping(value):
        fields: Fields = value
        if fields.get("bytes") is not None or fields.get("path") is not None:
            return value
        content = next((fields[key] for key in _CONTENT_KEYS[kind] if fields.get(key) is not None), None)
        if content is None:
            named = ", ".join(str(key) for key, entry in fields.items() if entry is not None) or "nothing"
            raise DataError(f"an entry of the {kind}s has {named:.200}; accepted: bytes, a path, or {{bytes, path}}")
        return media_value(content, kind)
    if isinstance(value, str) and value.startswith("file://"):
        return unquote(value.removeprefix("file://"))
    if is_list(value) and kind == "video":  # frames
        return [media_value(frame) for frame in value]
    return cast(object, value)


# Cells that hold a conversation or images as a text


def written_messages(prompt: str) -> object:
    """Returns the messages that a prompt holds as a text; an ordinary prompt as it is.

    Raises `DataError` if the text has a role and a content, and is neither JSON nor a Python literal of messages.
    """
    if not (_WRITTEN.match(prompt) and _HAS_ROLE.search(prompt) and _HAS_CONTENT.search(prompt)):
        return prompt
    messages = _messages_in(_literal(prompt))
    if not messages:
        raise DataError(
            f"holds messages as a text that is neither JSON nor a Python literal of one conversation: {prompt[:100]!r}. "
            "Store them as a list of {role, content}, or as JSON"
        )
    return messages


def written_values(values: Sequence[object]) -> list[object]:
    """Returns the images or videos of a cell, of which a text may hold one or several."""
    result: list[object] = []
    for value in values:
        if isinstance(value, str) and value.strip() in _NOTHING:
            continue
        content = _literal(value)
        if isinstance(content, list | tuple):
            result += cast("Sequence[object]", content)
        else:
            result.append(content)
    return result


def _literal(text: object) -> object:
    """Returns what a text holds that is written as JSON or as Python shows it, at most twice; another value as it is."""
    value = text
    for _ in range(2):
        if isinstance(value, str) and _WRITTEN.match(value):
            try:
                value = read_literal(value)
            except DataError:  # a path or a text that begins like one of these
                return value
    return value


def _messages_in(value: object) -> Sequence[object]:
    """Returns the messages that a value is or has: one, a list of them, or a mapping with one such list; else none."""
    if _is_message(value):
        return [value]
    lists = list(value.values()) if is_mapping(value) else [value]
    conversations: list[Sequence[object]] = []
    for entry in lists:
        if isinstance(entry, list | tuple) and any(map(_is_message, cast("Sequence[object]", entry))):
            conversations.append(cast("Sequence[object]", entry))
    return conversations[0] if len(conversations) == 1 else []


def _is_message(value: object) -> bool:
    if not is_mapping(value):
        return False
    has_speaker = "role" in value or "from" in value
    has_text = "content" in value or "value" in value
    return has_speaker and has_text


def _parts_in(content: str) -> object:
    """Returns the parts of a message that its content holds as a text; an ordinary content as it is."""
    value = _literal(content) if '"type"' in content or "'type'" in content else content
    is_parts = is_list(value) and value and all(is_mapping(part) and "type" in part for part in value)
    return value if is_parts else content
