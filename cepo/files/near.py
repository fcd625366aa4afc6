"""Finds the path on the disk that a missing one was probably meant to be."""

from __future__ import annotations

from pathlib import Path

from cepo.errors import nearest_name


def near_path(path: str) -> str:
    """Returns " Did you mean 'PATH'?" for a path that exists and differs in one name from the missing `path`; else empty.

    The names have the same ending, or differ in it alone.
    """
    missing = Path(path)
    by_stem: dict[str, Path] = {}
    try:
        folder = next(parent for parent in missing.parents if parent.is_dir())
        wrong_name, *names_below = missing.relative_to(folder).parts
        wrong = Path(wrong_name)
        for entry in sorted(folder.iterdir()):
            candidate = entry.joinpath(*names_below)
            is_alike = entry.suffix == wrong.suffix or entry.stem == wrong.stem
            if is_alike and candidate.exists():
                by_stem[entry.stem] = candidate
    except (OSError, ValueError, StopIteration):  # too long a path, a null byte, a folder that cannot be read
        return ""
    nearest = nearest_name(wrong.stem, by_stem)
    return "" if nearest is None else f" Did you mean '{by_stem[nearest]}'?"
