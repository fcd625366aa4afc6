"""Sampling responses: vLLM in process, or transformers where vLLM is not installed."""
