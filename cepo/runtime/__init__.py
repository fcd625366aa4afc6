"""Runs one worker process per device under Ray, on one or many machines; the trainer remains in the driver process."""
