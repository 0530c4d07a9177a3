"""Pure functions on plain tensors, each reading like the equation in its paper."""
