"""Checks in advance that hub names are available, because the hub's own libraries retry each file for half a minute."""

from __future__ import annotations

import logging
import os
import ssl
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from cepo.config.paths import find_path
from cepo.errors import ConfigError

logger = logging.getLogger(__name__)

_SECONDS = 5.0
_TRUE = ("1", "on", "yes", "true")


def require_hub_names(models: Iterable[tuple[str, str | None]], data: Iterable[tuple[str, str | None]]) -> None:
    """Checks that all models and data sets that are not local can be read from the hub or from the cache.

    If the hub does not answer, this process and its children use earlier downloads, as with HF_HUB_OFFLINE.

    Args:
        models, data: pairs of setting and value; None, local paths and `microgeo:` are skipped.

    Raises:
        ConfigError: the hub cannot be reached, and a name is not in the cache.
    """
    asked = [(key, name, "models") for key, name in models] + [(key, name, "datasets") for key, name in data]
    remote = [(key, name.partition("@")[0], kind) for key, name, kind in asked if name is not None and _is_remote(name)]
    if not remote:
        return
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE:
        why = "HF_HUB_OFFLINE is set"
    else:
        silent = _why_silent(endpoint)
        if silent is None:
            return
        why = f"the hub {endpoint} cannot be reached ({silent})"
    for key, name, kind in remote:
        if not _is_cached(name, kind):
            raise ConfigError(
                f"{key}={name}: there is no such local path, {why}, and no earlier download is in {_cache()}. Give a local "
                "folder or file, or connect this machine: HF_ENDPOINT names a mirror, HTTPS_PROXY a proxy"
            )
    if os.environ.get("HF_HUB_OFFLINE", "").lower() not in _TRUE:
        logger.warning("%s: using earlier downloads in %s", why, _cache())
        _go_offline()


def _is_remote(name: str) -> bool:
    return not name.startswith("microgeo:") and find_path(name) is None and find_path(name.partition("@")[0]) is None


def _why_silent(endpoint: str) -> str | None:
    """Returns why nothing answers at the address, or None if anything answers."""
    found: list[str | None] = []

    def ask() -> None:
        request = urllib.request.Request(endpoint, method="HEAD", headers={"User-Agent": "cepo"})
        try:
            urllib.request.urlopen(request, timeout=_SECONDS).close()
        except urllib.error.HTTPError:
            found.append(None)
        except urllib.error.URLError as error:
            # The hub's client has its own certificates and may succeed although this request fails.
            is_unsure = isinstance(error.reason, ssl.SSLError)
            # The reason is an OSError or a string.
            found.append(None if is_unsure else str(getattr(error.reason, "strerror", None) or error.reason))
        except (TimeoutError, OSError) as error:
            found.append(str(error) or type(error).__name__)
        else:
            found.append(None)

    asking = threading.Thread(target=ask, daemon=True)  # a DNS look-up has no timeout
    asking.start()
    asking.join(_SECONDS + 1)
    return found[0] if found else f"no answer within {_SECONDS:g} s"


def _cache() -> Path:
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()


def _is_cached(name: str, kind: str) -> bool:
    if (_cache() / f"{kind}--{name.replace('/', '--')}").is_dir():
        return True
    prepared = os.environ.get("HF_DATASETS_CACHE") or _cache().parent / "datasets"
    return kind == "datasets" and (Path(prepared).expanduser() / name.replace("/", "___")).is_dir()


def _go_offline() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    for module, constant in (("huggingface_hub.constants", "HF_HUB_OFFLINE"), ("datasets.config", "HF_HUB_OFFLINE")):
        if module in sys.modules:  # it has read the environment when imported
            setattr(sys.modules[module], constant, True)
