"""Signal, noise and direction of the methods' gradients over batches of rollouts at fixed weights."""
