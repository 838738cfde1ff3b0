"""``biasflash demo``: a small vision transformer learns real digits through biasflash, beside its plain torch twin."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional

import biasflash
from biasflash.nn import RelativePositionBias2d

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

SIDE, CLASSES, TEST_SIZE = 8, 10, 360
DIM, HEADS, DEPTH = 32, 8, 2
BATCH, NOISE, LABEL_SMOOTHING, LEARNING_RATE = 32, 0.2, 0.1, 6e-3
#: Adam divides a step by the size of its gradient. Many gradients here are near 1e-5, and with the usual 1e-8 their
#: parameters would follow rounding as eagerly as meaning: two equal runs would drift apart.
ADAM_EPS = 1e-4

#: least share of the 360 test digits that must be read correctly
WANTED_ACCURACY = 0.96
#: largest difference of the bias's first gradient, relative to its largest entry: float32 rounding of a few thousand
#: terms. The rule is the same on every device.
GRADIENT_BOUND = 1e-4
#: largest difference of the two learned biases, relative to their spread. Rounding grows along the hundreds of steps of
#: a training run, so this cannot be a rounding bound: measured on a CPU, the first gradients differ by 2e-7 of the
#: largest entry, and the learned biases by 1.3 to 2.1 % of their spread from seed 0, 0.01 % from 1. A bias gradient
#: that is wrong by a percent is far above the other bound.
BIAS_BOUND = 0.05

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


# ------------------------------------------------------------------------------------------------------------- model


def plain_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The same formula in plain PyTorch: ``B N H D`` in and out, scores and weights as whole arrays."""
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) * q.shape[-1] ** -0.5 + bias
    return torch.einsum("bhmn,bnhd->bmhd", scores.softmax(-1), v)


def first_glances() -> Tensor:
    """Where the heads look before they learn, ``(HEADS, 15, 15)``: each two pixels away, in a direction of its own."""
    step = torch.arange(1 - SIDE, SIDE)
    angle = torch.arange(HEADS) * (2 * math.pi / HEADS)
    down = step[:, None] - 2 * angle.sin()[:, None, None]
    right = step[None, :] - 2 * angle.cos()[:, None, None]
    return 4 * torch.exp(-(down**2 + right**2) / 4.5)


class Block(nn.Module):
    """Attention with a trained bias, then a perceptron; both behind a norm and beside a skip."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.bias = RelativePositionBias2d(SIDE, SIDE, HEADS)
        with torch.no_grad():
            self.bias.table.copy_(first_glances())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, DIM // HEADS)).unbind(-3)
        x = x + self.out(self.attend(q, k, v, self.bias()).flatten(-2))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class Reader(nn.Module):
    """Digit reader. A token is the brightness of one pixel: only the learned biases know where that pixel is."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.embed = nn.Linear(1, DIM)
        self.blocks = nn.ModuleList(Block(attend) for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images.flatten(1).unsqueeze(-1))  # B 64 DIM
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits

    def biases(self) -> list[Tensor]:
        """The bias parameters ``(HEADS, 15, 15)``, one per layer."""
        return [p for name, p in self.named_parameters() if name.endswith("bias.table")]

    def tables(self) -> Tensor:
        """What they have learned so far, ``(DEPTH, HEADS, 15, 15)``."""
        return torch.stack([t.detach().cpu() for t in self.biases()])


# ---------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True, kw_only=True)
class Digits:
    """Images ``(count, 8, 8)`` in -1 .. 1 and their labels, in two parts."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits(device: torch.device) -> Digits:
    """The handwritten digits inside scikit-learn, split once and for all: 360 to test, the others to learn from."""
    from sklearn.datasets import load_digits as load

    found = load()
    images = torch.tensor(found.images, dtype=torch.float32) / 8 - 1
    labels = torch.tensor(found.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_SIZE], order[TEST_SIZE:]
    parts = (images[train], labels[train], images[test], labels[test])
    a, b, c, d = (part.to(device) for part in parts)
    return Digits(images=a, labels=b, test_images=c, test_labels=d)


@dataclass(kw_only=True)
class Student:
    """One model in training, with what it has shown so far."""

    name: str
    model: Reader
    optimiser: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    first_gradient: Tensor | None = None
    seconds: float = 0.0

    def learn(self, images: Tensor, labels: Tensor) -> Tensor:
        """One step; returns the loss, still on the device."""
        loss = functional.cross_entropy(self.model(images), labels, label_smoothing=LABEL_SMOOTHING)
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if self.first_gradient is None:
            self.first_gradient = torch.stack([t.grad.cpu() for t in self.model.biases() if t.grad is not None])
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.schedule.step()
        return loss.detach()

    @torch.no_grad()
    def accuracy(self, data: Digits) -> float:
        right = self.model(data.test_images).argmax(-1) == data.test_labels
        return float(right.float().mean())


def enrol(name: str, attend: Attend, seed: int, steps: int, device: torch.device) -> Student:
    """A fresh student. The same seed gives the same parameters, whatever computes the attention."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Reader(attend)
    model.to(device)
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not n.endswith("bias.table")], "weight_decay": 0.02},
        {"params": model.biases(), "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.99), eps=ADAM_EPS)
    rates = [LEARNING_RATE, 5 * LEARNING_RATE]  # a table entry moves one score only, so it may move faster
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rates, total_steps=steps, pct_start=0.1)
    return Student(name=name, model=model, optimiser=optimiser, schedule=schedule)


def train(data: Digits, students: list[Student], epochs: int, seed: int) -> Iterator[int]:
    """Teaches all students the same batches in the same order; yields the epoch after every batch."""
    generator = torch.Generator().manual_seed(seed)  # on the CPU, so that every device sees the same order and noise
    device, count = data.images.device, len(data.labels)
    for epoch in range(epochs):
        totals = [torch.zeros((), device=device) for _ in students]
        order = torch.randperm(count, generator=generator)
        for chosen in torch.split(order, BATCH):
            noise = NOISE * torch.randn(len(chosen), SIDE, SIDE, generator=generator)
            rows = chosen.to(device)
            images, labels = data.images[rows] + noise.to(device), data.labels[rows]
            for student, total in zip(students, totals, strict=True):
                started = time.perf_counter()
                total += student.learn(images, labels) * len(chosen)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                student.seconds += time.perf_counter() - started
            yield epoch
        for student, total in zip(students, totals, strict=True):
            student.losses.append(total.item() / count)
            student.accuracies.append(student.accuracy(data))


# ----------------------------------------------------------------------------------------------------------- verdict


def gradient_difference(ours: Student, plain: Student) -> float:
    """Largest difference of the bias's gradient on the first batch, relative to its largest entry."""
    a, b = ours.first_gradient, plain.first_gradient
    assert a is not None
    assert b is not None
    return ((a - b).abs().max() / b.abs().max()).item()


def bias_difference(ours: Student, plain: Student) -> tuple[float, float]:
    """Largest difference of the learned biases, absolute and relative to their spread (largest minus smallest)."""
    a, b = ours.model.tables(), plain.model.tables()
    largest = (a - b).abs().max().item()
    return largest, largest / (b.max() - b.min()).item()


def verdict(accuracy: float, gradient: float, bias: float) -> list[str]:
    """What is wrong with a run, in words; empty if nothing is."""
    wrong = []
    if not accuracy >= WANTED_ACCURACY:
        wrong.append(f"test accuracy {accuracy:.1%} is below {WANTED_ACCURACY:.0%}")
    if not gradient <= GRADIENT_BOUND:
        wrong.append(f"first bias gradients differ by {gradient:.1e} of the largest entry, above {GRADIENT_BOUND:.0e}")
    if not bias <= BIAS_BOUND:
        wrong.append(f"learned biases differ by {bias:.1%} of their spread, above {BIAS_BOUND:.0%}")
    return wrong


# ----------------------------------------------------------------------------------------------------------- picture


def draw(ours: Student, plain: Student, path: Path) -> None:
    """Writes the PNG: the learned bias of every head as a heat map, and the curves of both runs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tables = ours.model.tables()
    tables = tables - tables.mean((-2, -1), keepdim=True)  # a constant per head changes nothing in a softmax
    reach = tables.abs().flatten().quantile(0.99).item()
    figure = Figure(figsize=(11, 6.6), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.add_gridspec(2, 1, height_ratios=(1.25, 1))
    maps_part, curves_part = figure.add_subfigure(rows[0]), figure.add_subfigure(rows[1])
    grid = maps_part.subplots(DEPTH, HEADS)
    for layer in range(DEPTH):
        for head in range(HEADS):
            axes = grid[layer, head]
            image = axes.imshow(tables[layer, head].numpy(), cmap="RdBu_r", vmin=-reach, vmax=reach)
            axes.plot(SIDE - 1, SIDE - 1, "+", color="black", markersize=5, markeredgewidth=0.8)
            axes.set_xticks([])
            axes.set_yticks([])
            if layer == 0:
                axes.set_title(f"head {head + 1}", fontsize=9)
            if head == 0:
                axes.set_ylabel(f"layer {layer + 1}", fontsize=9)
    maps_part.suptitle(
        "Learned bias, by the offset from the query (+) to the key: red attends more, blue less", fontsize=11
    )
    bar = maps_part.colorbar(image, ax=grid, shrink=0.8, pad=0.01)
    bar.set_label("added to the score", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    left, right = curves_part.subplots(1, 2)
    _curves(left, "training loss (labels smoothed)", (ours.name, ours.losses), (plain.name, plain.losses))
    _curves(right, "test accuracy", (ours.name, ours.accuracies), (plain.name, plain.accuracies))
    left.set_yscale("log")
    right.axhline(WANTED_ACCURACY, color="#999999", linewidth=0.8, linestyle=":")
    right.legend(frameon=False, fontsize=9, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _curves(axes: Axes, title: str, ours: tuple[str, list[float]], plain: tuple[str, list[float]]) -> None:
    epochs = range(1, len(ours[1]) + 1)
    axes.plot(epochs, ours[1], color="#c0392b", linewidth=3.5, alpha=0.55, label=ours[0], marker="o", markersize=4)
    axes.plot(epochs, plain[1], color="black", linewidth=1.1, linestyle="--", label=plain[0])
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("epoch", fontsize=9)
    axes.tick_params(which="both", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


# ----------------------------------------------------------------------------------------------------------- command


def _watch(console: Console, steps: Iterator[int], total: int, epochs: int, students: list[Student]) -> None:
    from rich import progress as bars

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=total)
        for epoch in steps:
            seen = [f"{s.name} {s.accuracies[-1]:.1%}" for s in students if s.accuracies]
            progress.update(task, advance=1, description="  ".join([f"epoch {epoch + 1}/{epochs}", *seen]))


def _report(console: Console, ours: Student, plain: Student) -> None:
    from rich.table import Table

    table = Table("attention", "training loss", "test accuracy", "seconds in its steps", title="after the last epoch")
    for student in (ours, plain):
        numbers = (f"{student.losses[-1]:.4f}", f"{student.accuracies[-1]:.1%}", f"{student.seconds:.1f}")
        table.add_row(student.name, *numbers)
    largest, relative = bias_difference(ours, plain)
    console.print(table)
    console.print(
        f"first bias gradient: largest difference {gradient_difference(ours, plain):.1e} of its largest entry"
    )
    console.print(f"learned bias: largest difference {largest:.2e}, {relative:.2%} of its spread")


def pick_device(name: str | None) -> torch.device:
    """The named device, or a GPU if there is one, or the CPU."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise typer.BadParameter(f"device {name!r} cannot be used here: {error}") from error
    return device


def demo(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the 1,437 training digits.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of parameters, order and noise, shared by both models.")] = 0,
    device: Annotated[str | None, typer.Option(help="Torch device. Default: a GPU if there is one, else cpu.")] = None,
    out: Annotated[Path, typer.Option(help="Where the picture is written.")] = Path("biasflash-demo.png"),
    backend: Annotated[str | None, typer.Option(help="biasflash backend. Default: chosen by biasflash.")] = None,
) -> None:
    """Train a digit reader with a learned 2-D relative-position bias, beside its twin in plain PyTorch.

    1,797 scanned digits of 8 x 8 pixels come with scikit-learn. A token is one pixel, and the bias is all that tells
    the model where it is. Both models start from the same parameters and see the same batches. Exit code 1 if the test
    accuracy stays below 96 %, or if the two disagree on the bias by more than rounding can explain.
    """
    try:
        import matplotlib  # noqa: F401
        import sklearn  # noqa: F401
        from rich.console import Console
    except ImportError as error:
        typer.echo(f"{error.name} is missing; install it with: pip install 'biasflash[demo]'", err=True)
        raise typer.Exit(2) from error
    console = Console()
    place = pick_device(device)
    torch.set_num_threads(1)  # products this small spend more time handing work to a second thread than doing it
    data = load_digits(place)
    total = epochs * math.ceil(len(data.labels) / BATCH)

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        found = biasflash.attention(q, k, v, bias, backend=backend)
        assert isinstance(found, Tensor)
        return found

    students = [enrol(n, a, seed, total, place) for n, a in (("biasflash", attend), ("plain PyTorch", plain_attention))]
    ours, plain = students
    console.print(f"{len(data.labels)} digits to learn, {TEST_SIZE} to test, on {place}; {total} steps, two models")
    started = time.perf_counter()
    _watch(console, train(data, students, epochs, seed), total, epochs, students)
    _report(console, ours, plain)
    draw(ours, plain, out)
    console.print(f"picture: {out}   total time: {time.perf_counter() - started:.0f} s")
    wrong = verdict(ours.accuracies[-1], gradient_difference(ours, plain), bias_difference(ours, plain)[1])
    for line in wrong:
        console.print(f"[bold red]failed:[/] {line}")
    if wrong:
        raise typer.Exit(1)
