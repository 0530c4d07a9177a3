"""Per-example norms of a GPT-2, whose layers are Hugging Face's own `Conv1D`."""

import pytest
import torch

from steadygrad.noise import NoiseScale
from tests.integrations.by_hand import NoiseByHand, flat_gradient, gpt2, summed_loss, token_batches

pytest.importorskip("transformers", reason="group integrations")


@pytest.mark.parametrize("length", [4, 12])
def test_conv1d_has_per_example_norms(length):
    model = gpt2().double()
    tokens = token_batches(1, rows=4, length=length)[0]["input_ids"]
    batch = {"input_ids": tokens, "labels": tokens}
    # Without them GPT-2 looks up positions once for all rows.
    positions, whole = torch.arange(length).expand(4, length), model.forward
    model.forward = lambda input_ids: whole(input_ids, position_ids=positions[: len(input_ids)])
    noise, expected = NoiseScale(model, source="per_example"), NoiseByHand()
    gradients = []
    for row in range(4):
        one = {name: value[row : row + 1] for name, value in batch.items()}
        (summed_loss(model, one, None) / (length - 1)).backward()
        gradients.append(flat_gradient([*model.parameters()]))
        model.zero_grad()
    expected.step(gradients, [1 / 4] * 4, [1] * 4)
    for _ in range(3):
        model.zero_grad()
        with noise.microbatch(4):
            (summed_loss(model, batch, None) / (4 * (length - 1))).backward()
        noise.step()
    estimate = noise.estimate()
    assert int(noise.altered) == 0
    # Embeddings are added up in the loss's float32.
    assert float(estimate.noise_trace) == pytest.approx(expected.noises[0], rel=1e-5)
    assert float(estimate.grad_sq_norm) == pytest.approx(expected.signals[0], rel=1e-5)
