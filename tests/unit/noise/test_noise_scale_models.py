"""`NoiseScale` on models with a twist: tied, checkpointed, frozen, compiled, normalised."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from steadygrad._checks import InputError
from steadygrad.noise import NoiseScale
from tests.reference import noise_scale as reference
from tests.unit.noise.training_loop import COUNTS, EXACT, last, make, measure, per_sample


class Tied(nn.Module):
    """An embedding that is also the output layer, with a layer used twice."""

    def __init__(self, mode=None):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.twice = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.mode = mode

    def forward(self, x):
        h = self.embed(x)
        for _ in range(2):
            if self.mode is None:
                h = torch.tanh(self.twice(h))
            else:
                h = checkpoint(lambda t: torch.tanh(self.twice(t)), h, use_reentrant=self.mode)
        return self.head(h)


def token_losses(model, x):
    out = model(x[:, :-1]).flatten(0, 1)
    loss = nn.functional.cross_entropy(out, x[:, 1:].flatten(), reduction="none")
    return loss.view(len(x), -1).mean(-1)


def tied_reference(model, x, parts, weights):
    rows = []
    for row in x:
        grads = torch.autograd.grad(token_losses(model, row[None]).sum(), list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]))
    return reference.signal_and_noise(torch.stack(rows).detach(), parts, weights)


@pytest.mark.parametrize("source", ["microbatch", "accumulated", "per_example"])
@pytest.mark.parametrize("mode", [None, False], ids=["plain", "checkpointed"])
def test_tied_weights_and_checkpointing(source, mode):
    torch.manual_seed(0)
    model, x = Tied(mode).double(), torch.randint(7, (6, 5))
    noise = NoiseScale(model, source=source)
    for micro in x.split(3):
        loss = token_losses(model, micro).mean() / 2
        with noise.microbatch(3):
            loss.backward()
    noise.step()
    parts = [1] * 6 if source == "per_example" else [3, 3]
    expected = tied_reference(model, x, parts, [1.0] * len(parts))
    assert last(noise) == pytest.approx(expected, rel=EXACT)


def test_reentrant_checkpoint_of_a_reused_layer_is_refused_by_name():
    torch.manual_seed(0)
    model, x = Tied(mode=True).double(), torch.randint(7, (6, 5))
    noise = NoiseScale(model)
    loss = token_losses(model, x).mean()
    with (
        pytest.raises(InputError, match=r"twice\.bias"),
        noise.microbatch(6),
    ):
        loss.backward()


def test_reentrant_checkpoint_with_the_accumulated_source():
    torch.manual_seed(0)
    model, x = Tied(mode=True).double(), torch.randint(7, (6, 5))
    noise = NoiseScale(model, source="accumulated")
    for micro in x.split(3):
        with noise.microbatch(3):
            (token_losses(model, micro).mean() / 2).backward()
    noise.step()
    model.mode = None  # autograd.grad cannot go through a reentrant checkpoint
    assert last(noise) == pytest.approx(tied_reference(model, x, [3, 3], [1.0, 1.0]), rel=EXACT)


def test_unused_and_frozen_parameters_count_as_nothing():
    model, x, y = make()
    model.unused = nn.Linear(9, 9).double()
    model[0].requires_grad_(False)
    model.forward = lambda t: model[3](model[2](model[1](model[0](t))))
    noise = NoiseScale(model)
    measure(noise, model, x, y)
    rows = per_sample(model, x, y, wanted=lambda n: n[0] in "23")
    assert last(noise) == pytest.approx(reference.signal_and_noise(rows, COUNTS, [1.0] * 3))
    assert set(noise.estimate().by_group) == {"2", "3", "unused"}


@pytest.mark.slow
def test_a_compiled_model():
    model, x, y = make()
    compiled = torch.compile(model)
    noise = NoiseScale(compiled)
    measure(noise, compiled, x, y, [5, 5])
    expected = reference.signal_and_noise(per_sample(model, x, y), [5, 5], [1.0, 1.0])
    assert last(noise) == pytest.approx(expected, rel=EXACT)
    assert set(noise.estimate().by_group) == {"0", "2", "3"}


def test_batch_norm_is_warned_of():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.warns(UserWarning, match="BatchNorm1d"):
        NoiseScale(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NoiseScale(model.eval())


def test_a_model_without_memory_is_refused():
    with pytest.raises(InputError, match="meta"):
        NoiseScale(nn.Linear(2, 2, device="meta"))


def test_nothing_to_measure():
    with pytest.raises(InputError, match="trainable"):
        NoiseScale(nn.Linear(2, 2).requires_grad_(False))


def test_remove_takes_every_hook_off():
    model, x, y = make()
    for source in ("microbatch", "per_example"):
        noise = NoiseScale(model, source=source)
        measure(noise, model, x, y, [5, 5])
        noise.remove()
    assert all(not p._backward_hooks for p in model.parameters())
    assert all(not m._forward_hooks for m in model.modules())
