"""Model-specific code: processors, image tokens, position ids, LoRA targets and attention. No other package names a family."""
