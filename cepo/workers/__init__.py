"""Implements the work of one device with FSDP2 and PEFT: loading, scoring, updates, weight transfer, checkpoints."""
