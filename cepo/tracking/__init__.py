"""Records metrics, rollouts and validation samples in sinks."""
