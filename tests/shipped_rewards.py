"""The reward functions that the package ships, the examples among them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import cepo.rewards

FOLDER = Path(cepo.rewards.__file__).parent
EXAMPLES = FOLDER.parents[1] / "examples" / "reward_function"
NEEDED_BY_FILE: dict[str, dict[str, Any]] = {"dapo.py": {"max_response_length": 64, "overlong_buffer_length": 16}}
"""Keywords without a default."""


def _shipped_rewards() -> list[str]:
    """Each file with a REWARD_NAME, at each of its functions whose first argument is `reward_inputs` or `reward_input`."""
    specs = []
    for path in sorted([*FOLDER.glob("*.py"), *EXAMPLES.glob("*.py")]):
        tree = ast.parse(path.read_text())
        names = {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets}  # type: ignore[attr-defined]
        if "REWARD_NAME" in names:
            functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
            place = f"cepo/rewards/{path.name}" if path.parent == FOLDER else str(path)
            specs += [
                f"{place}:{node.name}"
                for node in functions
                if node.args.args and node.args.args[0].arg in ("reward_inputs", "reward_input")
            ]
    return specs


SHIPPED = _shipped_rewards()


def needed(spec: str) -> dict[str, Any]:
    """The keywords without a default of the function that `spec` names."""
    return NEEDED_BY_FILE.get(spec.rpartition("/")[2].partition(":")[0], {})
