"""Rewards: reading and comparing answers, the reward function's contract and loader, the pool that runs it."""
