"""What a test leaves alone: the user's caches, and all of this process that the next test could notice."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from cepo.algorithms import registry as base
from cepo.losses import registry as losses


@contextmanager
def own_caches(folder: Path) -> Iterator[None]:
    """Inside, converted data files and what was found out about them are kept in `folder`, and in no cache of the user's."""
    from datasets import config

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(folder))
        patch.setattr(config, "HF_DATASETS_CACHE", str(folder))
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield


@contextmanager
def restored_process() -> Iterator[None]:
    """Afterwards the process is as it was: threads, signal handlers, log levels, environment, folder, import path, methods."""
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        for heard in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, heard, signal.getsignal(heard))
        stack.enter_context(_restored_loggers())
        stack.enter_context(_restored_environment())
        stack.callback(os.chdir, Path.cwd())
        stack.callback(sys.path.__setitem__, slice(None), list(sys.path))
        stack.enter_context(_restored_methods())
        yield


@contextmanager
def _restored_loggers() -> Iterator[None]:
    """The root logger's state and that of the package's own."""

    def ours() -> list[logging.Logger]:
        names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "cepo"]
        return [logging.root, *map(logging.getLogger, names)]

    states = {logger.name: (logger.level, logger.disabled, logger.propagate) for logger in ours()}
    yield
    for logger in ours():
        level, logger.disabled, logger.propagate = states.get(logger.name, (logging.NOTSET, False, True))
        if logger.level != level:  # each call empties the caches of all loggers, of which there are thousands
            logger.setLevel(level)


@contextmanager
def _restored_environment() -> Iterator[None]:
    """All variables but Ray's: a cluster serves several tests, which join it with the token that these name."""

    def ours() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTEST_"))}

    variables = ours()
    yield
    for name in ours().keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


@contextmanager
def _restored_methods() -> Iterator[None]:
    """The registries of methods and losses; plugins that were loaded meanwhile are loaded anew by the next who names them."""
    methods_before = base.METHODS.classes
    losses_before = losses.LOSSES.classes
    plugins_before = base._plugins
    base.METHODS.classes = dict(methods_before)
    losses.LOSSES.classes = dict(losses_before)
    base._plugins = dict(plugins_before)
    yield
    base.METHODS.classes = methods_before
    losses.LOSSES.classes = losses_before
    base._plugins = plugins_before
