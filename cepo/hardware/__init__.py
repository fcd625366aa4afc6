"""Finds out what this machine offers to torch and vLLM, without loading the kernels of either."""
