"""Runs workers: `local` in this process on one device, `ray` in one process per device, on one or many machines."""
