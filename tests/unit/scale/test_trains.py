"""In real float16: the network of benchmarks/scaler_trains.py, for which one scale is too few."""

import importlib
from pathlib import Path

import pytest


@pytest.mark.slow
def test_many_scales_train_what_one_cannot(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    trains = importlib.import_module("scaler_trains")
    data = trains.Digits.load()

    def accuracy(make_scaler, kind="autocast"):
        return trains.train(data, make_scaler, seed=0, steps=70, kind=kind)

    full = accuracy(trains.unscaled, "float32")
    assert full > 0.7
    # Nine of 297 images: what roundings change half-way through training.
    assert accuracy(trains.automatic(0)) > full - 0.03
    # A single scale, as large as the network bears.
    assert accuracy(trains.one_scale(4)) < full - 0.3
