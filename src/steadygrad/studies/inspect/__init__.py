"""Study of float16 gradients: layers that underflow or overflow, and scales that prevent it.

``trials`` are the pieces of work, ``scalers`` scale the gradients of each phase, and ``nonfinite``
says whether a smaller scale would have helped. ``histogram`` counts exponents, ``diagnosis`` is
arithmetic on the counts (which layers are hurt, which scales to take), ``explain`` its words.
"""
