"""Whether the engine gives its memory back while the trainer scores and updates."""

from __future__ import annotations


def sleeps_between_phases(setting: str, *, free_bytes: int, update_bytes: int) -> bool:
    """Sleeping costs a copy of the engine's weights over the bus twice per step, so `auto` does it only where it must.

    Args:
        setting: `worker.rollout.sleep`.
        free_bytes: of the device, once the trainer's weights are on it and the engine has taken its share.
        update_bytes: what an update takes beyond the weights: gradients, optimizer, gathered blocks, activations.
    """
    if setting == "auto":
        return update_bytes > free_bytes
    return setting == "always"
