"""Overrides for torchtitan: ScaledAdam, LANS and LAMB by name, and metrics of steadygrad's tools.

.. code-block:: python

    config.override.imports = [
        ("steadygrad.integrations.torchtitan.optimizers", {"name": "LANS", "lr": 5e-3}),
        "steadygrad.integrations.torchtitan.metrics",
    ]

"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from steadygrad._checks import check_choice
from steadygrad.integrations import MissingExtraError
from steadygrad.integrations.metrics import noise_metrics, optimizer_metrics
from steadygrad.noise import NoiseScale
from steadygrad.optim import LAMB, LANS, ScaledAdam

try:
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
    from torchtitan.config.override import derive, override
except ImportError as error:
    raise MissingExtraError("torchtitan", None) from error

__all__ = ["SteadygradMetrics", "SteadygradOptimizers", "metrics", "optimizers"]

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "LAMB": LAMB,
    "LANS": LANS,
    "ScaledAdam": ScaledAdam,
}


class SteadygradOptimizers(OptimizersContainer):
    """torchtitan's optimizers, with ``LAMB``, ``LANS`` and ``ScaledAdam`` among their names."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """The configuration, as torchtitan's."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        if name in OPTIMIZERS:
            return OPTIMIZERS[name]
        factory: Callable[..., Optimizer] = OptimizersContainer._resolve_optimizer_factory(name)
        return factory


@override(target=OptimizersContainer.Config, description="ScaledAdam, LANS and LAMB by name")
def optimizers(cfg: Any, name: str | None = None, **options: Any) -> Any:
    """Makes the names known; with a name, all parameters get that optimizer.

    Args:
        cfg: The configuration that is replaced.
        name: ``"LAMB"``, ``"LANS"`` or ``"ScaledAdam"`` for all parameters. None: what the
            configuration's groups say.
        **options: The optimizer's, with ``name``.
    """
    if name is None:
        return derive(cfg, SteadygradOptimizers.Config)
    check_choice("name", name, OPTIMIZERS)
    group = ParamGroupConfig(pattern=".*", optimizer_name=name, optimizer_kwargs=options)
    return derive(cfg, SteadygradOptimizers.Config, param_groups=[group])


class SteadygradMetrics(MetricsProcessor):
    """torchtitan's metrics, and the tools' numbers in ``extra_metrics``.

    Attributes:
        noise: An estimator, to be set by the trainer that uses it; None: there is none.
    """

    noise: NoiseScale | None = None

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """The configuration, as torchtitan's."""

    def log(
        self, *args: Any, extra_metrics: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Adds steps that the optimizers skipped, and the noise scale; waits for the device."""
        numbers = optimizer_metrics(self.optimizers or ())
        if self.noise is not None:
            numbers |= noise_metrics(self.noise)
        super().log(*args, extra_metrics={**(extra_metrics or {}), **numbers}, **kwargs)


@override(target=MetricsProcessor.Config, description="metrics of steadygrad's tools")
def metrics(cfg: Any) -> Any:
    """Puts :class:`SteadygradMetrics` in the place of torchtitan's."""
    return derive(cfg, SteadygradMetrics.Config)
