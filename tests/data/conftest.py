"""Fixtures of the tests of data."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from isolation import own_caches


@pytest.fixture(scope="module", autouse=True)
def _copies_of_data_go(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every file that is read leaves a copy in the user's cache."""
    with own_caches(tmp_path_factory.mktemp("cache")):
        yield
