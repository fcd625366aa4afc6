"""What is trained on, and how: the reference trainer's own words for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class Response:
    """One recorded response.

    `answer` is what it boxes, None for nothing; `right` whether that is the ground truth; `cut` whether the length limit
    ended it, so that no end token stands behind it.
    """

    text: str
    answer: str | None
    right: bool
    cut: bool = False

    @property
    def reward(self) -> float:
        """Nine tenths for being right, one for an answer."""
        return 0.9 * self.right + 0.1 * (self.answer is not None)


@dataclass(frozen=True)
class Problem:
    """A question about images, and the responses to it: one list for each step, and the greedy one of each step."""

    question: str
    images: tuple[Image.Image, ...]
    truth: str
    responses: tuple[tuple[Response, ...], ...]
    greedy: tuple[Response, ...]


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """`kind` forward_kl or jsd (with weight 1/2), over the vocabulary or over the student's `top` entries and the rest."""

    kind: str
    top: int | None = None
    importance_clip: float | None = None
    entropy_beta: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One training run.

    `method`, `loss`, `aggregation`, `teacher` and the sources of references have the words of the configuration.
    `kl`: (penalty, coefficient, "loss" or "reward"). `lora`: (rank, alpha).
    """

    method: str
    steps: int = 2
    horizon: int = 4
    epochs: int = 2
    prompts_per_update: int = 2
    temperature: float = 1.3
    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.01
    max_norm: float = 1.0
    clip: tuple[float, float, float] = (0.1, 0.35, 3.0)
    loss: str = "default"
    aggregation: str = "token"
    longest_response: int = 40
    gamma: float = 1.0
    gae_lambda: float = 1.0
    critic_learning_rate: float = 1e-3
    critic_clip: float = 0.5
    mixing: float = 0.5
    mixing_steps: int = 25
    radius: float = 0.5
    threshold: float = 2.0
    floor: float = 0.1
    baseline: str = "group"
    num_wrong: int = 4
    right_source: str = "ground_truth"
    wrong_source: str = "peer_answer"
    exclude_self: bool = False
    teacher: str = "actor"
    ema_decay: float = 0.9
    divergence: Divergence | None = None
    policy_weight: float = 0.0
    kl: tuple[str, float, str] | None = None
    adaptive: tuple[float, float] | None = None  # target, horizon
    lora: tuple[int, int] | None = None
    taus: tuple[float, float] = (1.0, 1.05)
