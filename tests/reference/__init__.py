"""Slow, literal float64 versions: what the fast code must agree with."""
