"""What the tests and the lab share: checkpoints with random weights, rows to score and to learn from, and hostile texts."""
