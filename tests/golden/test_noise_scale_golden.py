"""`SplitBatchNoiseScale` repeats ALF's estimator, negative estimates included."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from steadygrad.noise import SplitBatchNoiseScale

FILES = sorted(Path(__file__).parent.glob("gns-*.npz"))


def run(golden, **overrides) -> np.ndarray:
    config = json.loads(str(golden["config"]))
    estimator = SplitBatchNoiseScale(**{"negative": "last_valid", **config["kwargs"], **overrides})
    x, y = torch.from_numpy(golden["x"]), torch.from_numpy(golden["y"])
    w = torch.zeros(x.shape[-1], dtype=torch.float64, requires_grad=True)
    b = torch.zeros((), dtype=torch.float64, requires_grad=True)
    values = []
    for step in range(len(x)):
        loss = (x[step] @ w + b - y[step]) ** 2
        if "[2,B]" in config["model"]:
            loss = torch.stack([loss, loss / 2])
        torch.manual_seed(step)
        values.append(estimator(loss, {"w": w, "nest": [b]}).item())
        grads = torch.autograd.grad(loss.mean(), [w, b])
        with torch.no_grad():
            w -= 0.02 * grads[0]
            b -= 0.02 * grads[1]
    return np.array(values)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_repeats_the_original(file):
    golden = np.load(file)
    # 1e-5: the original keeps its averages in float32 and adds 1e-8 to the denominator.
    np.testing.assert_allclose(run(golden), golden["gns"], rtol=1e-5)


def test_all_five_files_are_here():
    assert len(FILES) == 5


def test_unresolved_is_nan_where_the_original_held_its_last_value():
    golden = np.load(Path(__file__).parent / "gns-negative.npz")
    honest, held = run(golden, negative="unresolved"), golden["gns"]
    unresolved = np.isnan(honest)
    assert unresolved.any()
    repeated = np.append(False, held[1:] == held[:-1]) | (held == 0)
    np.testing.assert_array_equal(unresolved, repeated)
    np.testing.assert_allclose(honest[~unresolved], held[~unresolved], rtol=1e-5)
