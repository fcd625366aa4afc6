"""Serialises messages between the trainer and a worker; images are sent at most once per step, or only by reference."""

from __future__ import annotations

import dataclasses
import io
import pickle
from typing import Any

import torch
from torch import Tensor

from cepo.data.reading import ImageStore
from cepo.models.inputs import ImageInputs
from cepo.rollout.generator import GenerationRequest


class Sender:
    """Encodes messages for one receiver, and remembers until `forget` which images the receiver has.

    Sender and receiver must forget them before the same message, the first of a step.

    Args:
        by_source: the receiver itself reads the images that name their source.
    """

    def __init__(self, *, by_source: bool) -> None:
        self._by_source = by_source
        self._sent: dict[int, ImageInputs] = {}

    def forget(self) -> None:
        self._sent.clear()

    def encode(self, value: object) -> bytes:
        buffer = io.BytesIO()
        _Pickler(buffer, self._by_source, self._sent).dump(value)
        return buffer.getvalue()


class Receiver:
    """Decodes the messages of one `Sender`."""

    def __init__(self, store: ImageStore) -> None:
        self._store = store
        self._received: dict[int, ImageInputs] = {}

    def decode(self, message: bytes) -> Any:
        """Decodes a message. An image is the same object in all messages of a step.

        Raises:
            ConfigError, DataError: an image that was sent by reference cannot be read here.
        """
        return _Unpickler(io.BytesIO(message), self._store, self._received).load()

    def forget(self) -> None:
        self._received.clear()
        self._store.forget()


def encode(value: object) -> bytes:
    """Encodes a worker's answer, which contains no images, as bytes for `decode`."""
    return Sender(by_source=False).encode(value)


def decode(message: bytes) -> Any:
    return pickle.loads(message)


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, by_source: bool, sent: dict[int, ImageInputs]) -> None:
        super().__init__(buffer, protocol=5)
        self._by_source, self._sent = by_source, sent

    def persistent_id(self, obj: object) -> object:
        """Sends images by reference and anything else by value."""
        if isinstance(obj, ImageInputs):
            if self._by_source and obj.source is not None:
                return ("source", obj.source)
            key = id(obj)
            if key in self._sent:
                return ("sent", key)
            self._sent[key] = obj  # keeps the image alive, so that no other object can get its id
            return ("new", key, {each.name: getattr(obj, each.name) for each in dataclasses.fields(obj)})
        if isinstance(obj, GenerationRequest) and self._by_source and obj.images and obj.image_source is not None:
            return ("request", dataclasses.replace(obj, images=()))
        return None

    def reducer_override(self, obj: object) -> object:
        """Pickles only a tensor's own elements; by default a slice would carry the whole storage of its source."""
        if isinstance(obj, Tensor):
            flat = obj.detach().cpu().contiguous().reshape(-1)
            return _tensor, (flat.view(torch.uint8).numpy(), obj.dtype, tuple(obj.shape))
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, store: ImageStore, received: dict[int, ImageInputs]) -> None:
        super().__init__(buffer)
        self._store, self._received = store, received

    def persistent_load(self, pid: Any) -> Any:
        kind, *content = pid
        if kind == "source":
            return self._store.inputs(content[0])
        if kind == "request":
            request: GenerationRequest = content[0]
            assert request.image_source is not None
            return dataclasses.replace(request, images=self._store.images(request.image_source))
        if kind == "new":
            key, values = content
            self._received[key] = ImageInputs(**values)
        return self._received[content[0]]


def _tensor(flat: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(flat).view(dtype).reshape(shape)
