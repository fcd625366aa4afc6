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

    Sender and receiver must forget them before the same message, the first of a step. With `by_source` the receiver
    itself reads the images that name their source.
    """

    def __init__(self, *, by_source: bool) -> None:
        self.by_source = by_source
        self.sent: dict[int, ImageInputs] = {}

    def forget(self) -> None:
        self.sent.clear()

    def encode(self, value: object) -> bytes:
        buffer = io.BytesIO()
        _Pickler(buffer, self).dump(value)
        return buffer.getvalue()


def encode(value: object) -> bytes:
    """Encodes a worker's answer, which contains no images, for `pickle.loads`."""
    return Sender(by_source=False).encode(value)


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, sender: Sender) -> None:
        super().__init__(buffer, protocol=5)
        self._by_source, self._sent = sender.by_source, sender.sent

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


class Receiver:
    """Decodes the messages of one `Sender`."""

    def __init__(self, store: ImageStore) -> None:
        self._store = store
        self._received: dict[int, ImageInputs] = {}

    def decode(self, message: bytes) -> Any:
        """Decodes a message. An image is the same object in all messages of a step."""
        unpickler = pickle.Unpickler(io.BytesIO(message))
        unpickler.persistent_load = self._referred  # type: ignore[method-assign]
        return unpickler.load()

    def forget(self) -> None:
        self._received.clear()
        self._store.forget()

    def _referred(self, pid: Any) -> Any:
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
