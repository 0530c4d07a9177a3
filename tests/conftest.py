"""Where there is no CUDA device, Triton's kernels are tried by its interpreter.

Triton asks for it as it is read in, which any test file may bring about: so it is said here.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
