"""Runs the training loop, written against protocols: it imports no Ray, no vLLM, no transformers, no FSDP."""
