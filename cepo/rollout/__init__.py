"""Samples responses with vLLM in this process, or with transformers if vLLM is not installed."""
