"""Gradient scaling layer by layer, for training in float16.

:class:`LayerwiseGradScaler` takes the place of ``torch.amp.GradScaler``.
"""

from steadygrad.scale.findings import MeasuredExponents
from steadygrad.scale.layerwise import LayerwiseGradScaler
from steadygrad.scale.options import AutoScale, LayerScale

__all__ = ["AutoScale", "LayerScale", "LayerwiseGradScaler", "MeasuredExponents"]
