"""Which batch size: extra samples, measured by training, and predicted for longer runs."""
