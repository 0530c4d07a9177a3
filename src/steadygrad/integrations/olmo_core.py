"""A callback for OLMo-core that measures the noise scale before gradients are clipped."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from steadygrad.integrations import MissingExtraError
from steadygrad.integrations.metrics import noise_metrics
from steadygrad.noise import NoiseScale

try:
    from olmo_core.data.utils import get_labels, split_batch
    from olmo_core.train.callbacks import Callback
except ImportError as error:
    raise MissingExtraError("ai2-olmo-core", None) from error


@dataclass
class NoiseScaleCallback(Callback):
    """Measures the noise scale in sequences, and records it as ``steadygrad/noise_scale/...``.

    .. code-block:: python

        trainer_config.with_callback("noise_scale", NoiseScaleCallback())

    A micro-batch weighs as its tokens do, by which OLMo-core divides the loss. The measurements
    are in its checkpoints. Steps that the trainer skips, and its dry run, are not measured.

    Attributes:
        interval: Optimizer steps between two records; reading waits for the device.
        options: Options of :class:`NoiseScale`.
    """

    interval: int = 10
    options: dict[str, Any] = field(default_factory=dict)

    # Without annotations, as they are no fields.
    noise = None  # type: NoiseScale | None
    _loaded = None  # type: Any

    def pre_train(self) -> None:
        """Hooks the estimator to the model as it is trained."""
        model = self.trainer.train_module.model
        self.noise = NoiseScale(model, **self.options)
        if self._loaded is not None:
            self.noise.load_state_dict(self._loaded)
        # OLMo-core names no micro-batch to callbacks: each forward pass in training takes the next.
        self._waiting: deque[tuple[int, Tensor]] = deque()
        self._handle = model.register_forward_pre_hook(self._tell)

    def pre_step(self, batch: dict[str, Any]) -> None:
        """Splits the batch as the train module will, and counts its tokens."""
        module = self.trainer.train_module
        ignored = module.label_ignore_index
        labels = batch["labels"] if "labels" in batch else get_labels(batch, ignored)
        rows = module.rank_microbatch_size // labels.shape[1]
        micros = split_batch({"input_ids": labels, "labels": labels}, rows)
        counts = [(len(micro["labels"]), (micro["labels"] != ignored).sum()) for micro in micros]
        total = sum(tokens for _, tokens in counts)
        self._waiting = deque((samples, tokens / total) for samples, tokens in counts)

    def _tell(self, model: nn.Module, *_: Any) -> None:
        if model.training and self._waiting and self.noise is not None:
            count, weight = self._waiting.popleft()
            self.noise.samples(count, weight=weight)

    def pre_optim_step(self) -> None:
        """Measures the step, and records the numbers every ``interval`` steps."""
        assert self.noise is not None
        self.noise.step()
        if self.step % self.interval == 0:
            for name, value in noise_metrics(self.noise).items():
                self.trainer.record_metric(name, value)

    def close(self) -> None:
        if self.noise is not None:
            self.noise.remove()
            self._handle.remove()

    def state_dict(self) -> dict[str, Any]:
        state = self._loaded if self.noise is None else self.noise.state_dict()
        return {} if state is None else {"noise": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Puts the measurements back, or keeps them until training begins."""
        self._loaded = state_dict.get("noise")
        if self.noise is not None and self._loaded is not None:
            self.noise.load_state_dict(self._loaded)
