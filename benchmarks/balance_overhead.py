"""Cost of balancing three losses on a wide output in a training step.

A convolutional decoder puts out audio, on which an l1 loss, a spectral loss and a discriminator's
loss look. The baseline is the least that balancing by hand needs: each loss's gradient of the
audio, summed, and one backward pass through the decoder. Peers run where they are installed:
see benchmarks/originals.py; TorchJD by `pip install "torchjd>=0.18"`.

Run: python benchmarks/balance_overhead.py [--rounds 30] [--threads 2] [--save]
"""

import argparse
import copy
import ctypes
import datetime
import importlib.util
import weakref
from collections.abc import Callable
from typing import Any

import torch
from originals import load_balancer
from side_by_side import hardware, measure, save, table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from steadygrad.balance import LossBalancer

WEIGHTS = {"l1": 1.0, "spectral": 2.0, "adv": 4.0}
ITEMS, LENGTH = 4, 65_536


class PeakMemory(TorchDispatchMode):
    """The most bytes of tensors made inside that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.seen:
            return
        size = storage.nbytes()
        self.seen[key] = weakref.ref(storage, lambda _: self._drop(key, size))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _drop(self, key: int, size: int) -> None:
        self.seen.pop(key, None)
        self.now -= size


def make_decoder() -> nn.Module:
    """From a latent with shape (B, 32, L/16) to audio with shape (B, 1, L)."""
    return nn.Sequential(
        nn.Conv1d(32, 64, 7, padding=3),
        nn.ELU(),
        nn.ConvTranspose1d(64, 32, 8, stride=4, padding=2),
        nn.ELU(),
        nn.ConvTranspose1d(32, 16, 8, stride=4, padding=2),
        nn.ELU(),
        nn.Conv1d(16, 1, 7, padding=3),
        nn.Tanh(),
    )


def make_critic() -> nn.Module:
    """Scores of audio, with shape (B, 1, *)."""
    return nn.Sequential(
        nn.Conv1d(1, 16, 15, stride=4), nn.LeakyReLU(0.2), nn.Conv1d(16, 16, 15, stride=4),
        nn.LeakyReLU(0.2), nn.Conv1d(16, 1, 5),
    )  # fmt: skip


def spectrum(audio: Tensor) -> Tensor:
    """Magnitudes of a short-time Fourier transform."""
    window = torch.hann_window(512, device=audio.device)
    found = torch.stft(audio.squeeze(1), 512, 256, window=window, return_complex=True)
    return (found.real**2 + found.imag**2 + 1e-6).sqrt()


class Step:
    """Forward, losses and backward of a copy of the decoder, one way or another."""

    def __init__(self, decoder: nn.Module, critic: nn.Module) -> None:
        self.decoder, self.critic = copy.deepcopy(decoder), copy.deepcopy(critic)
        draw = torch.Generator().manual_seed(0)
        self.latent = torch.randn(ITEMS, 32, LENGTH // 16, generator=draw).to(DEVICE)
        self.target = torch.randn(ITEMS, 1, LENGTH, generator=draw).to(DEVICE)
        self.wanted = spectrum(self.target)

    def losses(self, ys: dict[str, Tensor]) -> dict[str, Tensor]:
        """The three losses, each from its own copy of the audio."""
        return {
            "l1": (ys["l1"] - self.target).abs().mean(),
            "spectral": (spectrum(ys["spectral"]) - self.wanted).square().mean(),
            "adv": -self.critic(ys["adv"]).mean(),
        }

    def __call__(self) -> None:
        self.decoder.zero_grad()
        self.backward(self.decoder(self.latent))

    def backward(self, y: Tensor) -> None:
        """One ordinary backward pass of the weighted sum."""
        losses = self.losses(dict.fromkeys(WEIGHTS, y))
        sum(WEIGHTS[k] * loss for k, loss in losses.items()).backward()


class FrozenStep(Step):
    """The critic's parameters need no gradient, as in a generator's step."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.critic.requires_grad_(False)


class ByHand(FrozenStep):
    """The least that balancing needs."""

    def backward(self, y: Tensor) -> None:
        total = None
        for loss in self.losses(dict.fromkeys(WEIGHTS, y)).values():
            (gradient,) = torch.autograd.grad(loss, [y])
            total = gradient if total is None else total.add_(gradient)
        y.backward(total)


class Balanced(FrozenStep):
    """A balancer's `backward`."""

    def __init__(self, make: Callable[[], Any], *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.balancer = make()

    def backward(self, y: Tensor) -> None:
        self.balancer.backward(self.losses(dict.fromkeys(WEIGHTS, y)), y)


class Forked(Balanced):
    """A fork, and an ordinary backward pass."""

    def backward(self, y: Tensor) -> None:
        sum(self.losses(self.balancer.fork(y)).values()).backward()


class Jacobian(FrozenStep):
    """TorchJD: a Jacobian of the decoder's parameters, and its mean."""

    def backward(self, y: Tensor) -> None:
        from torchjd.aggregation import Sum
        from torchjd.autojac import jac_to_grad, mtl_backward

        losses = list(self.losses(dict.fromkeys(WEIGHTS, y)).values())
        mtl_backward(losses, features=y, parallel_chunk_size=1)
        jac_to_grad(list(self.decoder.parameters()), Sum())


def variants() -> dict[str, Step]:
    """Everything that can run here; the first is the baseline."""
    torch.manual_seed(0)
    parts = make_decoder().to(DEVICE), make_critic().to(DEVICE)
    found: dict[str, Step] = {
        "by hand: partial gradients, summed": ByHand(*parts),
        "plain backward of the weighted sum": FrozenStep(*parts),
        "LossBalancer.fork": Forked(lambda: LossBalancer(WEIGHTS), *parts),
        "LossBalancer.backward": Balanced(lambda: LossBalancer(WEIGHTS), *parts),
        "LossBalancer.fork, monitor": Forked(lambda: LossBalancer(WEIGHTS, monitor=True), *parts),
    }
    original = load_balancer()
    if original is not None:
        found["audiocraft's Balancer"] = Balanced(lambda: original(WEIGHTS), *parts)
    if importlib.util.find_spec("torchjd") is not None:
        found["TorchJD's mtl_backward, Sum"] = Jacobian(*parts)
    return found


def memory(steps: dict[str, Step]) -> str:
    """Peak bytes of each variant's step, as a table."""
    lines = ["| peak memory of a step | MiB | of the baseline |", "| --- | --- | --- |"]
    base = None
    for name, step in steps.items():
        step()
        with PeakMemory() as tracker:
            step()
        base = base or tracker.peak
        lines.append(f"| {name} | {tracker.peak / 2**20:.1f} | {tracker.peak / base:.3f} |")
    return "\n".join(lines)


def keep_freed_memory() -> None:
    """Asks glibc not to hand freed memory back: page faults cost more than what is measured."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        trim, mmap = -1, -3
        libc.mallopt(trim, 2**30)
        libc.mallopt(mmap, 2**30)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    DEVICE = options.device
    keep_freed_memory()
    steps = variants()
    today = datetime.date.today().isoformat()
    times = table(measure(steps, rounds=options.rounds), "forward and backward")
    title = f"# Balancing three losses: cost of a step, {today}"
    text = f"{title}\n\n{hardware(DEVICE)}.\n\n{times}\n\n{memory(steps)}\n"
    print(text)
    if options.save:
        print(save(f"balance-overhead-{DEVICE}", text, today))
