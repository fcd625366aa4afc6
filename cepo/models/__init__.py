"""Contains all code that depends on the model family: processors, image tokens, position ids, LoRA targets, attention."""
