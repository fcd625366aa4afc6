"""Defines the default reward with its seconds, for `lab.hostile_answers`."""

import time

from cepo.rewards.math import compute_score

REWARD_TYPE = "sequential"


def main(sample):
    began = time.perf_counter()
    (score,) = compute_score([sample])
    return {**score, "seconds": time.perf_counter() - began}
