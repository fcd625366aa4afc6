"""Reads the images of rows again by their places, as ranks and sampling engines need them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cepo.data.images import decoded_images, located
from cepo.data.row_parser import read_cells
from cepo.data.tables import Rows, read_source
from cepo.models.interface import ImageInputs, ImageSource

if TYPE_CHECKING:
    from PIL import Image

    from cepo.data.row_settings import RowRules
    from cepo.models.processing import Processing


class ImageStore:
    """Reads the images of rows as the trainer does, each once."""

    def __init__(self, rules: RowRules, processing: Processing) -> None:
        self._rules = rules
        self._processing = processing
        self._rows: dict[str, Rows] = {}
        self._images: dict[ImageSource, tuple[Image.Image, ...]] = {}
        self._inputs: dict[ImageSource, ImageInputs] = {}

    def images(self, source: ImageSource) -> tuple[Image.Image, ...]:
        """Returns a row's decoded images for the rollout engine; raises `ConfigError` or `DataError` on failure."""
        if source not in self._images:
            own_key = self._rules.cells.image_key
            key = source.column or own_key
            with located(f"{source.data}, row {source.row}"):
                cells = read_cells(self._rows_of(source.data)[source.row], self._rules.cells)
                values = cells.images if key == own_key else cells.teacher_images
                self._images[source] = decoded_images(values, key, self._rules.images)
        return self._images[source]

    def inputs(self, source: ImageSource) -> ImageInputs:
        """Returns the images of a row, masked if the source has a mask, as inputs of the vision tower."""
        if source not in self._inputs:
            unmasked = replace(source, mask=None)
            images = self.images(unmasked)
            assert images, f"row {source.row} of {source.data} has no image"
            if source.mask is None:
                inputs = self._processing.load_images(images, source)
            else:
                inputs = self._processing.load_masked(images, source.mask, unmasked)
            assert inputs is not None, "there are images"
            self._inputs[source] = inputs
        return self._inputs[source]

    def forget(self) -> None:
        """Frees all images; the data sets remain open."""
        self._images.clear()
        self._inputs.clear()

    def _rows_of(self, name: str) -> Rows:
        if name not in self._rows:
            self._rows[name] = read_source(name)
        return self._rows[name]
