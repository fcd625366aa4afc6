"""Rewards: answer extraction and comparison, the reward function's contract and loader, and the pool that runs it."""
