"""Reads the images of rows again by their places, as ranks and sampling engines need them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cepo.data.cells import read_cells
from cepo.data.images import decoded_images
from cepo.data.reading import read_source
from cepo.data.table import Rows
from cepo.models.inputs import ImageInputs, ImageSource

if TYPE_CHECKING:
    from PIL import Image

    from cepo.config.schema import DataConfig
    from cepo.models.processing import Processing


class ImageStore:
    """Reads the images of rows as the trainer does, each once."""

    def __init__(self, config: DataConfig, processing: Processing) -> None:
        self._config, self._processing = config, processing
        self._rows: dict[str, Rows] = {}
        self._images: dict[ImageSource, tuple[Image.Image, ...]] = {}
        self._inputs: dict[ImageSource, ImageInputs] = {}

    def images(self, source: ImageSource) -> tuple[Image.Image, ...]:
        """Returns a row's decoded images for the rollout engine; raises `ConfigError` or `DataError` on failure."""
        if source not in self._images:
            if source.data not in self._rows:
                self._rows[source.data] = read_source(source.data)
            cells = read_cells(self._rows[source.data][source.row], self._config)
            key = source.column or self._config.image_key
            values = (
                cells.images
                if source.column is None or source.column == self._config.image_key
                else cells.teacher_images
            )
            self._images[source] = decoded_images({key: values}, self._config, key)
        return self._images[source]

    def inputs(self, source: ImageSource) -> ImageInputs:
        """Returns the images of a row as inputs of the vision tower."""
        if source not in self._inputs:
            inputs = self._processing.load_images(self.images(source), source)
            assert inputs is not None, f"row {source.row} of {source.data} has no image"
            self._inputs[source] = inputs
        return self._inputs[source]

    def forget(self) -> None:
        """Frees all images; the data sets remain open."""
        self._images.clear()
        self._inputs.clear()
