"""Changing the texts of nested data, and listing it."""

from __future__ import annotations

from cepo.files.trees import leaves, with_texts


def test_texts_change_in_mappings_and_lists_at_any_depth() -> None:
    tree = {"a": "x", "b": ["x", {"x": "x", "c": [["x"], 1, True, None]}], "d": {"e": "x"}}
    assert with_texts(tree, str.upper) == {
        "a": "X",
        "b": ["X", {"x": "X", "c": [["X"], 1, True, None]}],
        "d": {"e": "X"},
    }
    assert tree["a"] == "x"


def test_leaves_have_dotted_keys_and_empty_mappings_are_values() -> None:
    tree = {"a": {"b": 1, "c": {"d": [2, {"e": 3}]}}, "f": {}, 4: None}
    assert list(leaves(tree)) == [("a.b", 1), ("a.c.d", [2, {"e": 3}]), ("f", {}), ("4", None)]
