"""Shows the rollouts of any trainer, as they lie in its files."""
