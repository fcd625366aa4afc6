"""Where the records of a run go: its folder, the console, TensorBoard and external trackers."""
