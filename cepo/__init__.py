"""cepo: Contrastive Evidence Policy Optimization for vision-language models."""

__version__ = "0.1.0"
