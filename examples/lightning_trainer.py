"""Lightning's Trainer, which logs the noise scale and grows its batch by a schedule."""

import logging
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from steadygrad.integrations.lightning import BatchSizeCallback, NoiseScaleCallback
from steadygrad.noise import BatchSizeSchedule

# Lightning remarks on devices that are not used and on loaders without workers.
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Classifier(LightningModule):
    """Two layers; nothing in it knows of steadygrad."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)
        )

    def training_step(self, batch: tuple[torch.Tensor, ...], batch_idx: int) -> torch.Tensor:
        """Mean cross-entropy of a micro-batch."""
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def on_train_batch_end(self, *_: object) -> None:
        """Prints what was logged last, now and then."""
        found, step = self.trainer.callback_metrics, self.trainer.global_step
        if step % 20 == 0 and not self.trainer.fit_loop._should_accumulate():
            value, low, size = (
                float(found.get(f"steadygrad/{name}", torch.nan))
                for name in ("noise_scale/value", "noise_scale/low", "batch_size")
            )
            print(f"{step:4}  {size:5.0f}  {value:5.0f}, above {low:.0f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any optimizer will do."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


seed_everything(0, verbose=False)
x = torch.randn(4000, 20)
y = (x[:, 0] * x[:, 1] + 0.5 * torch.randn(4000) > 0).long()
data = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)

schedule = BatchSizeSchedule(
    [{"from_samples": 0, "batch_size": 16}, {"from_samples": 640, "batch_size": 32}]
)
trainer = Trainer(
    max_steps=80,
    callbacks=[BatchSizeCallback(schedule, batch_size=8), NoiseScaleCallback()],
    gradient_clip_val=1.0,
    log_every_n_steps=20,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
print("step  batch  noise scale")
trainer.fit(Classifier(), data)
