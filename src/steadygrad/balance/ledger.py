"""What a balancer keeps: to be read, changed, saved and forgotten."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from steadygrad._checks import check_choice
from steadygrad.balance.metrics import metrics_of
from steadygrad.balance.options import Options
from steadygrad.balance.weights import check_names, check_weights

__all__ = ["Ledger"]


class Ledger(Options):
    """The part of :class:`LossBalancer` that no gradient passes through."""

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Changes the weights of the losses named; the averages stay.

        Raises:
            InputError: If a name is unknown, a weight negative, or no positive one is left.
        """
        for name in check_names(weights):
            check_choice("weights", name, self.core.names)
        self.core.set_weights(list(check_weights({**self.weights, **weights}).values()))

    @property
    def metrics(self) -> dict[str, Tensor]:
        """What the last step did, as tensors with shape ``()``; empty before the first one.

        ====================== ================================================================
        ``ratio_NAME``         share of the averaged norms before balancing; audiocraft's metric
        ``share_before_NAME``  share of this step's norms before balancing
        ``share_after_NAME``   share of this step's norms after balancing, and after an aggregator's
                               weights; not with one of whole gradients, which has none
        ``target_NAME``        share asked for, among the losses that took part
        ``norm_NAME``          this step's norm
        ``average_NAME``       the average it was scaled by
        ``scale_NAME``         factor on the loss's gradient
        ``nonfinite_NAME``     micro-batches it was left out of for a gradient that was not finite
        ``zero_NAME``          micro-batches it was left out of for a gradient of zero
        ``total``              with ``monitor``: norm of the whole batch's gradient handed on
        ``cosine_NAME_NAME``   with ``monitor``: between two losses' gradients
        ``disagreement``       on several processes: whether their options ever differed
        ====================== ================================================================
        """
        return {} if self._last is None else metrics_of(self.core, self._last)

    @property
    def left_out(self) -> dict[str, dict[str, Tensor]]:
        """In how many micro-batches each loss was left out, for a gradient that was there.

        ``{"nonfinite": {name: count}, "zero": {name: count}}``, of all processes together: one
        that is broken on two of them in one micro-batch counts once.
        """
        names = self.core.names
        return {
            "nonfinite": dict(zip(names, self.core.nonfinite.clone(), strict=True)),
            "zero": dict(zip(names, self.core.zero.clone(), strict=True)),
        }

    def end_step(self) -> None:
        """Ends a step cut short, as at an epoch's end, with its micro-batches; on every process."""
        self.core.averages.end_step(self.core.ranks.size)

    def reset(self) -> None:
        """Forgets all averages; weights and counts stay."""
        self.core.averages.reset_parameters()

    def reset_parameters(self) -> None:
        """Begins anew with the weights of now, as is the custom after `to_empty`."""
        self.core.reset_parameters()
        self._last = None

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Takes a saved state, by the losses' names. Its weights win over the constructor's.

        Args:
            state_dict: What ``state_dict`` gave.
            strict: Whether the losses must be those of old. If not, losses that were not saved
                start afresh, with their weights, and what was saved of others is dropped.
            assign: As in torch.

        Raises:
            InputError: If the losses are others, which also holds where a whole model is loaded.
        """
        self.core.partly = not strict
        try:
            return super().load_state_dict(state_dict, strict, assign)
        finally:
            self.core.partly = False

    def _load_from_state_dict(self, *state: Any, **options: Any) -> None:
        super()._load_from_state_dict(*state, **options)
        # Numbers of a step that is none of this state's.
        self._last = None

    def extra_repr(self) -> str:
        """The weights."""
        return f"{dict(self.weights)}"
