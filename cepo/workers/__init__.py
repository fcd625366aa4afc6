"""The work of one device with torch.distributed, FSDP2 and PEFT: loading, scoring, updates, weight sync, checkpoints."""
