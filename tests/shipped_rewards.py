"""The reward functions that the package ships, the examples among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples" / "reward_function"
SHIPPED = [
    *(f"cepo/rewards/{name}.py:compute_score" for name in ("benchmark", "math")),
    *(f"{EXAMPLES / name}.py:compute_score" for name in ("dapo", "math", "r1v", "rounded")),
]
"""Those that need nothing but text; the judge and the reward model ask another model."""


def needed(spec: str) -> dict[str, Any]:
    """The keywords without a default of the function that `spec` names."""
    return {"max_response_length": 64, "overlong_buffer_length": 16} if "dapo.py" in spec else {}
