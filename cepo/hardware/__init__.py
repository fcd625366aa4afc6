"""What this machine offers to torch and vLLM, found out without loading either's kernels."""
