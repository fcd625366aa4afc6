"""The only package that names model families: processors, image tokens, position ids, LoRA targets, attention."""
