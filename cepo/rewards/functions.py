"""Loads a reward function from a file: `path/to/file.py:function`."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import cepo
from cepo.errors import RewardError, did_you_mean, place_in
from cepo.rewards.contract import ContractError, RewardScore, validate_score, validate_scores

RewardType = Literal["batch", "sequential"]

_PACKAGE_ROOT = Path(cepo.__file__).resolve().parent

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
"""Package names of libraries that are imported under another name."""

_STAND_INS = {
    "mathruler": "Without it, use our EasyR1 rewards (examples/reward_function/math.py:compute_score and r1v.py) or "
    "the built-in cepo/rewards/math.py:compute_score",
}


@dataclass(frozen=True, kw_only=True)
class LoadedReward:
    """A reward function with its keywords bound."""

    function: Callable[[Any], Any]
    name: str
    """The file's REWARD_NAME; "unknown" if it has none."""
    reward_type: RewardType
    """The file's REWARD_TYPE; "batch" if it has none."""
    path: Path
    function_name: str
    needs_images: bool = False
    """The file's NEEDS_IMAGES: whether the samples have the row's `images` and `videos`."""

    @property
    def source(self) -> str:
        return f"{self.path.name}:{self.function_name}"

    def score(self, reward_inputs: Sequence[Mapping[str, object]], *, first_sample: int = 0) -> list[RewardScore]:
        """Calls the function in this process, without a time limit, and checks what it returned.

        `first_sample` is the number of the first input for error messages. Raises what the function raises, and
        `RewardError` if it breaks the contract.
        """
        samples = [dict(reward_input) for reward_input in reward_inputs]
        if self.reward_type == "batch":
            scores = self.function(samples)
            return validate_scores(scores, len(samples), source=self.source, first_sample=first_sample)
        return [
            validate_score(self.function(sample), sample=index, source=self.source)
            for index, sample in enumerate(samples, start=first_sample)
        ]


def resolve_reward_path(spec: str) -> tuple[Path, str]:
    """Returns the existing file and the function name (default `main`) in `spec`; runs nothing.

    A relative path is looked up in the working directory, then, if it starts with `cepo/`, in the installed package, so
    `cepo/rewards/math.py:compute_score` works from any folder. Raises `RewardError` if the file does not exist.
    """
    file, separator, function_name = spec.rpartition(":")
    if not separator or "/" in function_name or function_name.endswith(".py"):
        file, function_name = spec, "main"
    if not file or not function_name:
        raise RewardError(f"reward function {spec!r}: give path/to/file.py:function.")
    path = Path(file).expanduser()
    if path.is_file():
        return path.resolve(), function_name
    if not path.is_absolute() and path.parts[0] == "cepo":
        packaged = _PACKAGE_ROOT.parent / path
        if packaged.is_file():
            return packaged, function_name
    raise RewardError(
        f"reward function {spec!r}: there is no file {str(path)!r} (working directory {Path.cwd()}). "
        "Give path/to/file.py:function; the built-in one is cepo/rewards/math.py:compute_score."
    )


def load_reward_function(spec: str, kwargs: Mapping[str, object]) -> LoadedReward:
    """Runs the file that `spec` names and binds `kwargs` to its function.

    Raises `RewardError` if the file is missing or fails to run, if it has no such function, if the function is not
    callable or does not take `kwargs`, or if REWARD_TYPE is neither "batch" nor "sequential".
    """
    path, function_name, module, function = _loaded(spec)
    reward_type = getattr(module, "REWARD_TYPE", "batch")  # optional, unlike in EasyR1
    if reward_type not in ("batch", "sequential"):
        raise RewardError(f"{path}: REWARD_TYPE = {reward_type!r}; it is 'batch' or 'sequential'.")
    _check_keywords(function, kwargs, f"{path.name}:{function_name}")
    return LoadedReward(
        function=functools.partial(function, **kwargs),
        name=str(getattr(module, "REWARD_NAME", "unknown")),
        reward_type=reward_type,
        path=path,
        function_name=function_name,
        needs_images=bool(getattr(module, "NEEDS_IMAGES", False)),
    )


def load_answer_function(spec: str) -> Callable[[str], str | None]:
    """Runs the file that `spec` names and returns its function, which finds the final answer in a response's text.

    White space around the result is removed; None and blank text mean that there is no answer. Raises `RewardError`
    like `load_reward_function`. A call raises `ContractError` if the function returns anything but text or None.
    """
    path, name, _, function = _loaded(spec)

    def extract(response: str) -> str | None:
        answer = function(response)
        if answer is not None and not isinstance(answer, str):
            raise ContractError(
                f"worker.reward.answer_function={path.name}:{name} returned a {type(answer).__name__}: {answer!r:.200}. "
                "Return the final answer as text, or None where a response has none."
            )
        return (answer or "").strip() or None

    return extract


def _loaded(spec: str) -> tuple[Path, str, ModuleType, Callable[..., Any]]:
    path, function_name = resolve_reward_path(spec)
    module = _run_file(path)
    if not hasattr(module, function_name):
        known = [name for name, value in vars(module).items() if inspect.isfunction(value) and name[0] != "_"]
        raise RewardError(
            f"{path} has no function {function_name!r}; it has {known}.{did_you_mean(function_name, known)} "
            "Name one as path/to/file.py:function."
        )
    function = getattr(module, function_name)
    if not callable(function):
        raise RewardError(f"{path}: {function_name} is a {type(function).__name__}, not a function.")
    return path, function_name, module, function


def _run_file(path: Path) -> ModuleType:
    # A name per file: two reward files with the same stem must not replace each other.
    name = f"cepo_reward_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise RewardError(f"{path} is not a Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(module_spec)
    # Dataclasses and pickle look up a class's module by name.
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        remedy = _installation(error.name) if isinstance(error, ModuleNotFoundError) and error.name else ""
        raise RewardError(
            f"{place_in(error, [path]) or path} fails when it is loaded: {type(error).__name__}: {error}{remedy}"
        ) from error
    return module


def _check_keywords(function: Callable[..., Any], kwargs: Mapping[str, object], source: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # Some compiled callables have no signature; the first call shows whether the keywords fit.
        return
    try:
        signature.bind([], **kwargs)
    except TypeError as error:
        keywords = list(signature.parameters)[1:]
        raise RewardError(
            f"{source} cannot be called with the samples and reward_function_kwargs {dict(kwargs)!r}: {error}. "
            f"After the samples it takes {keywords}."
        ) from error


def _installation(module: str) -> str:
    name = module.partition(".")[0]
    stand_in = f" {_STAND_INS[name]}." if name in _STAND_INS else ""
    return f". Install it: {sys.executable} -m pip install {_PACKAGES.get(name, name)}.{stand_in}"
