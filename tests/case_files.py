"""Tables of cases in YAML files beside the tests that read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def cases(test_file: str, name: str) -> Any:
    """The content of a YAML file in the folder of a test file."""
    return yaml.safe_load(Path(test_file).with_name(name).read_text(encoding="utf-8"))
