"""Sinks for metrics, rollouts and validation samples, and the format of a run folder."""
