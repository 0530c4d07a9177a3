"""A loop with Accelerate that measures the noise scale."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from steadygrad import NoiseScale

torch.manual_seed(0)
x = torch.randn(1920, 20)
y = (x[:, 0] + 0.5 * torch.randn(1920) > 0).long()
net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
model, optimizer, loader = accelerator.prepare(
    net, torch.optim.AdamW(net.parameters(), lr=3e-3), DataLoader(TensorDataset(x, y), batch_size=8)
)

noise = NoiseScale(model, samples=lambda: len(labels), scaler=accelerator.scaler)
accelerator.register_for_checkpointing(noise)
steps = 0
print("step  noise scale")
for inputs, labels in loader:
    with accelerator.accumulate(model):
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            noise.step()
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            steps += 1
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients and steps % 20 == 0:
        found = noise.estimate().as_dict()
        print(f"{steps:4}  {found['value']:.0f} [{found['low']:.0f}, {found['high']:.0f}]")
