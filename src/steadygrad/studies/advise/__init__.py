"""Which batch size: the noise scale, and sample overheads measured by training."""
