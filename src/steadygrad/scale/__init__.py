"""Gradient scaling layer by layer, for training in float16.

:class:`LayerwiseGradScaler` takes the place of ``torch.amp.GradScaler``.
"""

from steadygrad.scale.layers import AutoScale, LayerScale
from steadygrad.scale.scaler import LayerwiseGradScaler, MeasuredExponents

__all__ = ["AutoScale", "LayerScale", "LayerwiseGradScaler", "MeasuredExponents"]
