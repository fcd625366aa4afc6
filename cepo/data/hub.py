"""Asks the hub for each name before a run, because the libraries that read from it retry each file for half a minute."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from cepo.config.paths import find_path, split_source
from cepo.errors import ConfigError

logger = logging.getLogger(__name__)

_SECONDS = 5.0


def require_hub_names(models: Iterable[tuple[str, str | None]], data: Iterable[tuple[str, str | None]]) -> None:
    """Raises `ConfigError` if a model or data set is neither local nor on the hub nor in its cache.

    `models` and `data` are pairs of setting and value; None and `microgeo:` are skipped.
    """
    for kind, names in (("model", models), ("dataset", data)):
        for key, name in names:
            repository = split_source(name)[0] if name else ""
            if name and not name.startswith("microgeo:") and not (find_path(name) or find_path(repository)):
                _require(key, repository, kind)


def _require(key: str, name: str, kind: str) -> None:
    from huggingface_hub import HfApi, constants  # takes a while, which runs on local files need not wait for
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    try:
        HfApi(endpoint=os.environ.get("HF_ENDPOINT")).repo_info(name, repo_type=kind, timeout=_SECONDS)
    except Exception as error:  # its client raises many types where nothing answers
        if isinstance(error, HfHubHTTPError) and not isinstance(error, RepositoryNotFoundError):
            return  # the hub answers, and the libraries know when to ask again
        reason = str(error).partition("\n")[0]
        download = Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}"
        if not download.is_dir():
            raise ConfigError(
                f"{key}={name}: there is no such local path, the hub cannot be reached or has no such {kind} ({reason}), and "
                f"no earlier download is in {constants.HF_HUB_CACHE}. Give a local folder or file, or connect this machine: "
                "HF_ENDPOINT names a mirror, HTTPS_PROXY a proxy"
            ) from error
        logger.warning(
            "%s=%s: using the earlier download (%s). HF_HUB_OFFLINE=1 saves further attempts", key, name, reason
        )
