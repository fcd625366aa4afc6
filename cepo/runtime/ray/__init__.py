"""One worker process per device under Ray, on one machine or many; the trainer stays on the driver."""

from cepo.runtime.ray.backend import RayBackend

__all__ = ["RayBackend"]
