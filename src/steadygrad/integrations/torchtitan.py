"""Overrides for torchtitan: ScaledAdam, LANS and LAMB by name.

.. code-block:: python

    config.override.imports = [
        ("steadygrad.integrations.torchtitan.optimizers", {"name": "LANS", "lr": 5e-3}),
    ]
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from steadygrad._checks import check_choice
from steadygrad.integrations import MissingExtraError
from steadygrad.optim import LAMB, LANS, ScaledAdam

try:
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
    from torchtitan.config.override import derive, override
except ImportError as error:
    raise MissingExtraError("torchtitan", None) from error


OPTIMIZERS: dict[str, Any] = {kind.__name__: kind for kind in (LAMB, LANS, ScaledAdam)}


class SteadygradOptimizers(OptimizersContainer):
    """torchtitan's optimizers, with ``LAMB``, ``LANS`` and ``ScaledAdam`` among their names."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """The configuration, as torchtitan's."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        return OPTIMIZERS.get(name) or OptimizersContainer._resolve_optimizer_factory(name)


@override(target=OptimizersContainer.Config, description="ScaledAdam, LANS and LAMB by name")
def optimizers(cfg: Any, name: str | None = None, **options: Any) -> Any:
    """Makes the names known in a configuration.

    With a ``name``, ``"LAMB"``, ``"LANS"`` or ``"ScaledAdam"``, all parameters get that optimizer,
    with the ``options``. None: what the configuration's groups say.
    """
    if name is None:
        return derive(cfg, SteadygradOptimizers.Config)
    check_choice("name", name, OPTIMIZERS)
    group = ParamGroupConfig(pattern=".*", optimizer_name=name, optimizer_kwargs=options)
    return derive(cfg, SteadygradOptimizers.Config, param_groups=[group])
