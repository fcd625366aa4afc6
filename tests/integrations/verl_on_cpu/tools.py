"""A tool in verl's form, which its agent loop reads from this file (`multi_turn.function_tool_path`)."""

from __future__ import annotations

from verl.tools.function_tool import function_tool


@function_tool
def multiply(a: int, b: int) -> str:
    """Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return str(a * b)
