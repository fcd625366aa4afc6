"""Reads the images of a row, for the trainer's problems and in workers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from cepo.config.schema import DataConfig
from cepo.data.images import load_rgb
from cepo.data.reading import read_source, without_decoding
from cepo.models.inputs import ImageInputs, ImageSource
from cepo.models.processing import Processing

if TYPE_CHECKING:
    from PIL.Image import Image


def listed(row: Mapping[str, Any], key: str) -> list[Any]:
    """Returns a cell's values as a list: none, one, or several."""
    value = row.get(key)
    if value is None or value == "":
        return []
    return [*cast("Sequence[Any]", value)] if isinstance(value, list | tuple) else [value]


def decoded_images(row: Mapping[str, Any], config: DataConfig) -> tuple[Image, ...]:
    """Returns a row's images in RGB, within the pixel limits; raises `DataError` if one cannot be decoded."""
    return tuple(
        load_rgb(value, config.image_dir, config.min_pixels, config.max_pixels)
        for value in listed(row, config.image_key)
    )


class ImageStore:
    """Caches the images of rows, so that each is read and preprocessed once.

    The images equal the trainer's bit for bit, because the same functions read the same rows.
    """

    def __init__(self, config: DataConfig, processing: Processing) -> None:
        self._config, self._processing = config, processing
        self._rows: dict[str, Any] = {}
        self._images: dict[ImageSource, tuple[Image, ...]] = {}
        self._inputs: dict[ImageSource, ImageInputs] = {}

    def images(self, source: ImageSource) -> tuple[Image, ...]:
        """Returns a row's decoded images for the rollout engine; raises `ConfigError` or `DataError` on failure."""
        if source not in self._images:
            self._images[source] = decoded_images(self._data(source.data)[source.row], self._config)
        return self._images[source]

    def inputs(self, source: ImageSource) -> ImageInputs:
        """Returns the images of a row as inputs of the vision tower."""
        if source not in self._inputs:
            inputs = self._processing.load_images(self.images(source), source)
            assert inputs is not None, f"row {source.row} of {source.data} has no image"
            self._inputs[source] = inputs
        return self._inputs[source]

    def keep(self, sources: Collection[ImageSource]) -> None:
        """Frees the images of all other rows; the data sets remain open."""
        self._images = {source: images for source, images in self._images.items() if source in sources}
        self._inputs = {source: inputs for source, inputs in self._inputs.items() if source in sources}

    def _data(self, name: str) -> Any:
        if name not in self._rows:
            text_columns = (self._config.prompt_key, self._config.answer_key)
            self._rows[name] = without_decoding(read_source(name, text_columns=text_columns))
        return self._rows[name]
