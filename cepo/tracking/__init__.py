"""Sinks for metrics, rollouts and validation samples, and the format of a run folder."""

from cepo.tracking.run_folder import MetricsRow, png_bytes
from cepo.tracking.sink import RunDescription, Sink, available_sinks, build_sink
from cepo.tracking.trace import GroupRecord, RolloutRecord
from cepo.tracking.tracker import Tracker, build_tracker

__all__ = [
    "GroupRecord",
    "MetricsRow",
    "RolloutRecord",
    "RunDescription",
    "Sink",
    "Tracker",
    "available_sinks",
    "build_sink",
    "build_tracker",
    "png_bytes",
]
