"""Defines, writes and reads the files of a run folder, apart from its checkpoints."""
