"""One device, DataParallel, DDP, FSDP2 and our policies on the same model and data."""
