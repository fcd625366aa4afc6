"""Contains the schema, loader and checks of a run's settings. It never imports torch."""

from cepo.config.checks import check_config
from cepo.config.loader import load_config
from cepo.config.paths import find_path, split_function
from cepo.config.record import dump_config, dump_for_record, record_tree
from cepo.config.schema import RunConfig

__all__ = [
    "RunConfig",
    "check_config",
    "dump_config",
    "dump_for_record",
    "find_path",
    "load_config",
    "record_tree",
    "split_function",
]
