"""The experiments behind the commands; each writes a run's record."""
