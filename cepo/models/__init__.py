"""Contains all code that depends on the model: processors, image tokens, position ids, LoRA targets and attention."""
