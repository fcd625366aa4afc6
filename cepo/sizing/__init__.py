"""How much memory a run needs, by arithmetic over the model's shape, and what follows from it: fits, sleeps, or is refused."""
