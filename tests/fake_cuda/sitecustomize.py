"""On PYTHONPATH: a CPU build of torch answers questions about GPUs as a CUDA build would. No kernel can be run.

CEPO_FAKE_CUDA holds JSON: `cuda` (version), `compiled` (architectures), `devices`, each with `name`, `capability`, `total` and
`free` in bytes; without devices torch sees none. `nvidia-smi` beside this file says CEPO_FAKE_DRIVER.
"""

import json
import os
from types import SimpleNamespace

_FAKE = json.loads(os.environ.get("CEPO_FAKE_CUDA", "null"))
if _FAKE is not None:
    import torch

    import cepo  # noqa: F401  (this file stands where the environment's own way of telling child processes would)

    _DEVICES = [] if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else _FAKE["devices"]

    def _device(device=None):
        return _DEVICES[getattr(device, "index", device) or 0]

    def _properties(device):
        major, minor = device["capability"]
        return SimpleNamespace(name=device["name"], total_memory=device["total"], major=major, minor=minor)

    torch.version.cuda = _FAKE["cuda"]
    torch.cuda.is_available = lambda: bool(_DEVICES)
    torch.cuda.device_count = lambda: len(_DEVICES)
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_name = lambda device=None: _device(device)["name"]
    torch.cuda.get_device_capability = lambda device=None: tuple(_device(device)["capability"])
    torch.cuda.mem_get_info = lambda device=None: (_device(device)["free"], _device(device)["total"])
    torch.cuda.get_device_properties = lambda device=None: _properties(_device(device))
