"""Where float16 gradients underflow or overflow, layer by layer, and which scales prevent it.

The parts, each by itself: ``trials`` (the pieces of work, and how each is run), ``scalers`` (how
gradients are scaled in each phase), ``nonfinite`` (whether a smaller scale would have helped),
``histogram`` (counts of exponents), ``diagnosis`` (which layers are hurt, and which scales to
take: arithmetic on the counts) and ``explain`` (words).
"""

from steadygrad.studies.inspect.study import Inspect

__all__ = ["STUDY", "Inspect"]

STUDY = Inspect
