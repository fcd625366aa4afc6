"""torch.distributed, FSDP2 and PEFT: loading, scoring, updating, teacher weights, weight synchronisation, checkpoints."""
