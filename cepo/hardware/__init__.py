"""Detects what this machine provides for torch and vLLM, without loading their kernels."""
