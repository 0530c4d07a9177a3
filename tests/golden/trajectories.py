"""Steps an optimizer through a golden file's gradients."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

HERE = Path(__file__).parent


def read(file: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays of a golden file, and what it was made with."""
    with np.load(file) as opened:
        arrays = {name: opened[name] for name in opened.files}
    return arrays, json.loads(str(arrays.pop("config")))


@dataclass
class Trajectory:
    """A golden file of an optimizer: initial values, gradients, and what became of the values."""

    config: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @classmethod
    def read(cls, name: str) -> "Trajectory":
        arrays, config = read(HERE / f"{name}.npz")
        return cls(config, arrays)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.config["shapes"]]

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.config.get("dtype", "float32"))

    def parameters(self) -> dict[str, Tensor]:
        init = {name: torch.as_tensor(self.arrays[f"init/{name}"]) for name in self.names}
        return {name: value.clone().to(self.dtype).requires_grad_() for name, value in init.items()}

    def follow(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: dict[str, Tensor],
        steps: range | None = None,
    ) -> float:
        """Largest deviation from the original, relative to each parameter's largest weight ever."""
        worst = 0.0
        for step in steps or range(self.config["steps"]):
            if "lr" in self.arrays:
                for group in optimizer.param_groups:
                    group["lr"] = float(self.arrays["lr"][step])
            for name, parameter in parameters.items():
                gradient = torch.as_tensor(self.arrays[f"grad/{name}"][step])
                parameter.grad = gradient.to(parameter).reshape(parameter.shape)
            optimizer.step()
            for name, parameter in parameters.items():
                expected = self.arrays[f"param/{name}"][step].astype(np.float64)
                found = parameter.detach().cpu().to(torch.float64).numpy()
                scale = np.abs(self.arrays[f"param/{name}"]).max()
                worst = max(worst, float(np.abs(found - expected).max() / scale))
        return worst
