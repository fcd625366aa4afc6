"""What a reward file imports, looked up without running it: a missing library is named before anything heavy starts."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cepo.errors import RewardError

_PACKAGES = {
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dotenv": "python-dotenv",
    "latex2sympy2": "latex2sympy2-extended",
    "Levenshtein": "levenshtein",
    "math_verify": "math-verify",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Libraries whose package has another name than the module."""

_STAND_INS = {
    "mathruler": "Without it: EasyR1's rewards in our words, examples/reward_function/math.py:compute_score and r1v.py, and the "
    "built-in cepo/rewards/math.py:compute_score",
}


def require_imports(path: Path) -> None:
    """Reads a reward file and looks for the libraries that it imports as it is loaded.

    Imports within functions, `try` and `if` are left to the run: they may be meant to fail.

    Raises:
        RewardError: the file is no Python, or what it imports is not found here.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except SyntaxError as error:
        raise RewardError(f"{path}, line {error.lineno}: this is no Python ({error.msg}).") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise RewardError(f"{path} cannot be read: {error}.") from error
    missing = [(line, name) for line, name in _imported(tree.body) if not _is_there(name)]
    if not missing:
        return
    line, name = missing[0]
    if (path.parent / name).is_dir() or (path.parent / f"{name}.py").is_file():
        raise RewardError(
            f"{path}, line {line} imports '{name}', which lies beside it but not on Python's path. Put the folder there: "
            f"PYTHONPATH={path.parent}"
        )
    packages = " ".join(dict.fromkeys(_PACKAGES.get(module, module) for _, module in missing))
    others = f", and further {', '.join(module for _, module in missing[1:])}" if missing[1:] else ""
    stand_in = f" {_STAND_INS[name]}." if name in _STAND_INS else ""
    raise RewardError(
        f"{path}, line {line} imports '{name}', which is not installed here{others}. Install it: "
        f"{sys.executable} -m pip install {packages}.{stand_in}"
    )


def _imported(body: Sequence[ast.stmt]) -> Iterator[tuple[int, str]]:
    """Line and top-level module of the absolute imports that run whenever the file does."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.partition(".")[0]
        elif isinstance(node, ast.With):
            yield from _imported(node.body)


def _is_there(name: str) -> bool:
    if name in sys.modules:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # a broken finder or module; loading the file will say what is wrong with it
        return True
