"""Where float16 gradients underflow or overflow, layer by layer, and scales that prevent it."""
