"""Computes the seconds of a step on eight cards, with rollouts of the current weights and with rollouts ahead.

    python3 -m lab.eight_cards

This is arithmetic from figures of one H200 (`lab/results/gpu_h200.json`); nothing of it has run on eight. The assumptions
are in `lab/notes/multi-node.md`, "Rollouts ahead".
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from lab.support.tables import table

CARDS = 8
MEASURED_RESPONSES = 256
"""The responses of a step of the measured card: 32 prompts x 8 responses."""
MEASURED_LENGTH = 512
PROMPT = 400
"""Tokens of a prompt."""
POSITION_MS = 10.1
"""Of all responses of the measured card together, with an adapter."""
ATTENTION_MS = 3.3
"""The part of a position that grows with the responses and their tokens."""
IDLE_MS = 2.0
"""The part of a position in which the card waits for the host."""
GENERATE = 5.6
TRAIN = 3.1 + 3.2
"""Seconds of scoring and update of the measured step."""
REST = 0.5
"""Seconds of reading, rewards and sending weights, which more cards do not divide."""
MEAN_LENGTH = 400
LONGEST = 2048


@dataclass(frozen=True)
class Lengths:
    """How long responses are: all `MEASURED_LENGTH`, or exponential with a limit."""

    has_tail: bool

    @property
    def mean(self) -> float:
        return MEAN_LENGTH * (1 - math.exp(-LONGEST / MEAN_LENGTH)) if self.has_tail else MEASURED_LENGTH

    def longest_of(self, num_responses: int) -> int:
        """Returns the expected length of the longest of all responses of a step, at most the limit."""
        if not self.has_tail:
            return MEASURED_LENGTH
        return min(LONGEST, round(MEAN_LENGTH * (math.log(num_responses) + 0.5772)))

    def share_alive(self, position: int) -> float:
        """Returns the share of responses that are at least this long."""
        return math.exp(-position / MEAN_LENGTH) if self.has_tail else float(position < MEASURED_LENGTH)


@dataclass(frozen=True)
class Sampling:
    """What a card needs to sample its responses of a step: seconds that grow with them, and positions at a fixed cost."""

    of_responses: float
    positions: int

    def seconds(self, lag: int = 1) -> float:
        """Returns seconds a step; `lag` batches are in flight at a time, and each position serves all of them."""
        return self.of_responses + self.positions / lag * (POSITION_MS - ATTENTION_MS) / 1000

    def busy(self, lag: int = 1) -> float:
        """Returns those of the seconds in which the card computes."""
        return self.seconds(lag) - self.positions / lag * IDLE_MS / 1000


def sampling(num_responses: int, num_cards: int, lengths: Lengths) -> Sampling:
    """Returns what each of `num_cards` needs; the slowest one has the longest response of all."""
    on_a_card = num_responses / num_cards
    positions = lengths.longest_of(num_responses)
    prefill = (GENERATE - MEASURED_LENGTH * POSITION_MS / 1000) * on_a_card / MEASURED_RESPONSES
    tokens_read = sum(lengths.share_alive(position) * (PROMPT + position) for position in range(positions))
    measured_reads = MEASURED_LENGTH * (PROMPT + MEASURED_LENGTH / 2)  # of each response
    attention = ATTENTION_MS / 1000 * MEASURED_LENGTH * on_a_card / MEASURED_RESPONSES * tokens_read / measured_reads
    return Sampling(prefill + attention, positions)


def training(num_responses: int, num_cards: int, lengths: Lengths) -> float:
    """Returns the seconds of scoring and update, which are divided by the tokens and the cards."""
    tokens = (lengths.mean + PROMPT / 8) / (MEASURED_LENGTH + PROMPT / 8)  # eight responses share a prompt
    return TRAIN * num_responses / MEASURED_RESPONSES * tokens / num_cards


def synchronous(num_responses: int, lengths: Lengths, num_cards: int = CARDS) -> float:
    own = sampling(num_responses, num_cards, lengths)
    return own.seconds() + training(num_responses, num_cards, lengths) + REST


def ahead_on_the_same_cards(num_responses: int, lengths: Lengths, lag: int) -> float:
    """Returns a step's seconds if training fills the time in which sampling leaves a card idle, and takes no other."""
    own = sampling(num_responses, CARDS, lengths)
    return max(own.seconds(lag), own.busy(lag) + training(num_responses, CARDS, lengths)) + REST


def ahead_on_separate_cards(num_responses: int, lengths: Lengths, lag: int) -> tuple[float, int]:
    """Returns a step's seconds and the number of sampling cards with which they are fewest."""
    splits: list[tuple[float, int]] = []
    for num_sampling in range(1, CARDS):
        own = sampling(num_responses, num_sampling, lengths)
        train = training(num_responses, CARDS - num_sampling, lengths)
        splits.append((max(own.seconds(lag), train) + REST, num_sampling))
    return min(splits)


def rows() -> list[Sequence[str]]:
    written: list[Sequence[str]] = []
    for has_tail in (False, True):
        lengths = Lengths(has_tail)
        for num_responses in (256, 2048):
            name = f"mean {MEAN_LENGTH}, limit {LONGEST:,}" if has_tail else f"all {MEASURED_LENGTH}"
            row = [name, f"{num_responses:,}", f"{sampling(num_responses, CARDS, lengths).seconds():.1f}"]
            row += [f"{training(num_responses, CARDS, lengths):.1f}", f"{synchronous(num_responses, lengths):.1f}"]
            for lag in (1, 2):
                row.append(f"{ahead_on_the_same_cards(num_responses, lengths, lag):.1f}")
                seconds, num_sampling = ahead_on_separate_cards(num_responses, lengths, lag)
                row.append(f"{seconds:.1f} ({num_sampling} + {CARDS - num_sampling})")
            written.append(row)
    return written


def main() -> int:
    head = ["lengths", "responses", "sample", "score and update", "synchronous step"]
    for lag in (1, 2):
        head += [f"{lag} ahead, same cards", f"{lag} ahead, separate cards"]
    print(table(head, rows()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
