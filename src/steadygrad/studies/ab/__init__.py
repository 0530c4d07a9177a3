"""Whether a change is real: paired runs of two or more tasks, commands or functions."""
