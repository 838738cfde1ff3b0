"""The demo in miniature: one epoch, both students, the verdict, the picture and the exit code."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import biasflash
from biasflash.cli import demo
from biasflash.cli.main import app

CPU = torch.device("cpu")


def some_digits(count: int) -> demo.Digits:
    data = demo.load_digits(CPU)
    return replace(data, images=data.images[:count], labels=data.labels[:count])


def pair(ours: demo.Attend, steps: int) -> list[demo.Student]:
    named = (("biasflash", ours), ("plain PyTorch", demo.plain_attention))
    return [demo.enrol(name, attend, 0, steps, CPU) for name, attend in named]


def test_the_digits_are_the_1797_scans_in_two_parts() -> None:
    data = demo.load_digits(CPU)
    assert data.images.shape == (1437, 8, 8)
    assert data.test_images.shape == (360, 8, 8)
    assert data.images.min() == -1
    assert data.images.max() == 1
    assert set(data.test_labels.tolist()) == set(range(10))
    both = torch.cat([data.images, data.test_images]).flatten(1)
    assert len(both.unique(dim=0)) == 1797


def test_both_students_start_alike_and_stay_alike() -> None:
    data, epochs = some_digits(128), 2
    ours, plain = students = pair(biasflash.attention, steps=4 * epochs)
    before = ours.model.tables()
    assert torch.equal(before, plain.model.tables())
    seen = list(demo.train(data, students, epochs, seed=0))
    assert seen == [0] * 4 + [1] * 4
    assert len(ours.losses) == len(ours.accuracies) == epochs
    assert demo.gradient_difference(ours, plain) <= demo.GRADIENT_BOUND
    assert demo.bias_difference(ours, plain)[1] <= demo.BIAS_BOUND
    assert (ours.model.tables() - before).abs().max() > 0.01
    assert ours.losses == pytest.approx(plain.losses, rel=1e-4)


def test_a_wrong_bias_gradient_is_noticed() -> None:
    def wrong(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return demo.plain_attention(q, k, v, bias.detach() + 1.01 * (bias - bias.detach()))

    data = some_digits(64)
    ours, plain = students = pair(wrong, steps=2)
    list(demo.train(data, students, 1, seed=0))
    assert demo.gradient_difference(ours, plain) > 50 * demo.GRADIENT_BOUND


def test_the_bias_is_all_that_knows_where_a_pixel_is() -> None:
    model = demo.Reader(demo.plain_attention)
    images = torch.rand(3, 8, 8)
    shuffled = images.flatten(1)[:, torch.randperm(64)].view(3, 8, 8)
    assert not torch.allclose(model(images), model(shuffled), atol=1e-3)
    for table in model.biases():
        torch.nn.init.zeros_(table)
    torch.testing.assert_close(model(images), model(shuffled), atol=1e-5, rtol=1e-5)


def test_the_verdict_says_what_is_wrong() -> None:
    good = (demo.WANTED_ACCURACY, demo.GRADIENT_BOUND, demo.BIAS_BOUND)
    assert demo.verdict(*good) == []
    for place, bad, words in ((0, 0.95, "accuracy"), (1, 2e-4, "first bias gradients"), (2, 0.5, "learned biases")):
        for value in (bad, float("nan")):
            numbers: Any = [*good[:place], value, *good[place + 1 :]]
            (line,) = demo.verdict(*numbers)
            assert words in line


@pytest.mark.fresh_memory_as_is  # pictures and progress bars are not ours
def test_the_command_paints_its_picture_and_fails_after_one_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = some_digits(96)
    monkeypatch.setattr(demo, "load_digits", lambda device: few)
    out = tmp_path / "new" / "picture.png"
    run = partial(CliRunner().invoke, app)
    done = run(["demo", "--epochs", "1", "--device", "cpu", "--backend", "cpu", "--out", str(out)])
    assert done.exit_code == 1, done.output
    assert "failed: test accuracy" in done.output
    assert "plain PyTorch" in done.output
    assert "learned bias: largest difference" in done.output
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_wrong_options_are_refused() -> None:
    run = partial(CliRunner().invoke, app)
    assert run(["demo", "--epochs", "0"]).exit_code == 2
    refused = run(["demo", "--device", "abacus"])
    assert refused.exit_code == 2
    assert "cannot be used here" in refused.output
