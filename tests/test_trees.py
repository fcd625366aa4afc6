"""Changing the texts of nested data."""

from __future__ import annotations

from cepo.trees import with_texts


def test_texts_change_in_mappings_and_lists_at_any_depth() -> None:
    """Five texts change; keys, numbers, truth values and null stay."""
    tree = {"a": "x", "b": ["x", {"x": "x", "c": [["x"], 1, True, None]}], "d": {"e": "x"}}
    assert with_texts(tree, str.upper) == {
        "a": "X",
        "b": ["X", {"x": "X", "c": [["X"], 1, True, None]}],
        "d": {"e": "X"},
    }
    assert tree["a"] == "x"
