"""Recognises settings and arguments that may hold secrets, and masks their values."""

from __future__ import annotations

import re
from typing import Any

from cepo.files.trees import is_list, is_mapping

MASK = "***"
_SECRET_NAME = (
    r"(?:[\w-]*[_-])?(?:(?:api|access|private|secret|signing|encryption|ssh|openai|anthropic|azure|google|gemini|hf|wandb)"
    r"[_-]?key|secret|token|password|passwd|passphrase|pwd|auth|authorization|bearer|cookie|credentials?)"
)
_SECRET = re.compile(_SECRET_NAME, re.IGNORECASE)
_SECRET_ENTRY = re.compile(
    rf"(?P<name>(?<![\w-])[\"']?{_SECRET_NAME}[\"']?\s*[:=]\s*)(?P<value>\"[^\"]*\"|'[^']*'|(?!\$\{{)[^,}}\]]+)",
    re.IGNORECASE,
)
_USER_IN_URL = re.compile(r"(?<=://)[^/\s?#]+(?=@)")


def is_secret(name: str) -> bool:
    """Returns whether the name of a setting or an environment variable indicates a secret."""
    return _SECRET.fullmatch(name) is not None


def without_secrets(value: object, *, name: str = "") -> Any:
    """Returns settings with all texts masked whose names indicate a secret, and users and passwords in URLs."""
    if is_mapping(value):
        return {key: without_secrets(entry, name=str(key)) for key, entry in value.items()}
    if is_list(value):
        return [without_secrets(entry, name=name) for entry in value]
    if not isinstance(value, str):
        return value
    return MASK if value and is_secret(name) else _USER_IN_URL.sub(MASK, value)


def masked_argument(argument: str) -> str:
    """Returns a command-line argument `a.b=value` with the values of secret settings masked."""
    key, _, value = argument.partition("=")
    _, _, name = key.rpartition(".")
    is_reference = value.startswith("${")
    if value and is_secret(name.lstrip("-")) and not is_reference:
        return f"{key}={MASK}"
    return _USER_IN_URL.sub(MASK, _SECRET_ENTRY.sub(rf"\g<name>{MASK}", argument))
