"""Records metrics, rollouts and validation samples in sinks, and defines the format of a run folder."""
