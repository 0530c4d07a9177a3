"""The noise scale, the balancer and the layer-wise scaler repeat what the originals computed."""

import ast
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.golden.trajectories import HERE, read
from torch import nn

from steadygrad import LossBalancer
from steadygrad.noise import SplitBatchNoiseScale
from steadygrad.scale import LayerwiseGradScaler

# The originals' float64 arithmetic in another order.
EXACT = {"rtol": 1e-12, "atol": 1e-15}
FILES = {"balancer": 3, "gns": 5, "icefall_checkpoint": 2, "lans": 7, "layerwise": 3}
FILES |= {"scaled_adam": 8, "scaled_adam_zipformer": 8}


def files(kind):
    """Tries a test on every file of a kind."""
    found = sorted(HERE.glob(f"{kind}-*.npz"))
    return pytest.mark.parametrize("file", found, ids=lambda file: file.stem)


def test_all_files_are_here():
    assert Counter(file.stem.partition("-")[0] for file in HERE.glob("*.npz")) == FILES


def noise_scales(file, **overrides):
    golden, config = read(file)
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
    return np.array(values), golden["gns"]


@files("gns")
def test_the_noise_scale_is_alfs(file):
    found, expected = noise_scales(file)
    # 1e-5: the original keeps its averages in float32 and adds 1e-8 to the denominator.
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_noise_scale_is_nan_where_alfs_held_its_last_value():
    honest, held = noise_scales(HERE / "gns-negative.npz", negative="unresolved")
    unresolved = np.isnan(honest)
    assert unresolved.any()
    repeated = np.append(False, held[1:] == held[:-1]) | (held == 0)
    np.testing.assert_array_equal(unresolved, repeated)
    np.testing.assert_allclose(honest[~unresolved], held[~unresolved], rtol=1e-5)


def losses_of(ys, target):
    return {
        "l1": (ys["l1"] - target).abs().mean(),
        "l2": 30 * (ys["l2"] - target).square().mean(),
        "adv": F.softplus(-ys["adv"].sum(-1)).mean(),
    }


@pytest.mark.parametrize("call", ["backward", "fork"])
@files("balancer")
def test_the_balancer_is_audiocrafts(file, call):
    golden, config = read(file)
    metrics = config["metrics"]
    metrics = ast.literal_eval(metrics) if isinstance(metrics, str) else metrics
    balancer = LossBalancer(config["weights"], **config["kwargs"])
    assert config["steps"] == len(golden["grad_y"]) == len(golden["x"])
    for step in range(config["steps"]):
        x, target = (torch.from_numpy(golden[name][step]) for name in ("x", "target"))
        handed_on = 2 * torch.tanh(x.requires_grad_())
        handed_on.retain_grad()
        y = handed_on.view_as(handed_on)
        if call == "backward":
            effective = balancer.backward(losses_of(dict.fromkeys(balancer.weights, y), target), y)
            np.testing.assert_allclose(effective, golden["effective_loss"][step], **EXACT)
        else:
            sum(losses_of(balancer.fork(y), target).values()).backward()
        # The file's was read from a `.grad` that retained each partial gradient too: it is the
        # gradient handed on plus the plain sum.
        own = handed_on.detach().requires_grad_()
        losses = losses_of(dict.fromkeys(balancer.weights, own), target)
        (raw,) = torch.autograd.grad(sum(losses.values()), own)
        np.testing.assert_allclose(handed_on.grad + raw, golden["grad_y"][step], **EXACT)
        for key, value in metrics[step].items():
            np.testing.assert_allclose(balancer.metrics[key], value, **EXACT)


@files("layerwise")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_the_layer_wise_scaler_is_fairscales_up_to_its_defect_after_an_overflow(file):
    golden, config = read(file)
    parts = [("fc1", nn.Linear(6, 8)), ("act1", nn.Tanh()), ("fc2", nn.Linear(8, 8))]
    parts += [("act2", nn.Tanh()), ("fc3", nn.Linear(8, 3)), ("identity", nn.Identity())]
    net = nn.Sequential(OrderedDict(parts)).double()
    net.load_state_dict({n: torch.from_numpy(golden[f"init/{n}"]) for n in net.state_dict()})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = LayerwiseGradScaler(net, config["scales"], **config["kwargs"])
    poisoned, skipped = config["poisoned_steps"], []
    for step in range(len(golden["x"])):
        x, y = (torch.from_numpy(golden[name][step]) for name in ("x", "y"))
        before = [p.detach().clone() for p in net.parameters()]
        optimizer.zero_grad()
        scaler.scale((net(x) - y).square().mean()).backward()
        # The file's inputs are clean; in these steps a gradient of the first layer was not.
        if step in poisoned:
            net.fc1.weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        if all(map(torch.equal, before, net.parameters())):
            skipped.append(step)
        found = [scaler.get_scales().get(layer, 1.0) for layer in config["layers"]]
        assert found == golden["scaling_factors"][step].tolist()
        for name, p in net.named_parameters():
            assert torch.isfinite(p).all()
            if not poisoned or step <= poisoned[0]:
                np.testing.assert_allclose(p.detach(), golden[f"param/{name}"][step], **EXACT)
    assert skipped == poisoned
    assert scaler.skipped == len(poisoned)
