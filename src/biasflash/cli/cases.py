"""``biasflash cases``: what check, bench and tune can be asked for by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from biasflash.testing.case import Case
from biasflash.testing.cases import select


def sizes(case: Case) -> str:
    """``"16 x 1024 x 12 x 64"``: batch axes, queries, heads and width, and what differs for keys and values."""
    keys = [f"N {case.N}"] if case.N != case.M else []
    keys += [f"Hkv {case.Hkv}"] if case.Hkv != case.Hq else []
    keys += [f"Dv {case.Dv}"] if case.Dv != case.D else []
    return " x ".join(map(str, (*case.batch, case.M, case.Hq, case.D))) + "".join(f", {k}" for k in keys)


def terms(case: Case) -> str:
    """Shapes of biases and masks, as in ``Bias`` and ``Mask``."""
    found = [f"bias {b.shape}" + ("" if b.trained else " fixed") for b in case.biases]
    found += [f"mask {m.shape}" for m in case.masks]
    return ", ".join(found + (["causal"] if case.causal else []))


def table(chosen: Sequence[Case]) -> Table:
    found = Table()
    for column in ("case", "*B x M x Hq x D", "terms", "what it is", "tags"):
        found.add_column(column, overflow="fold", no_wrap=column == "case")
    for case in chosen:
        found.add_row(case.name, sizes(case), terms(case), case.why, ", ".join(sorted(case.tags)))
    return found


def cases(
    names: Annotated[
        str, typer.Argument(help="Comma-separated names, globs or tags (smoke, check, workload, big, tune, all).")
    ] = "all",
) -> None:
    """List the named cases that check, bench and tune take with --cases.

    Example: biasflash cases 'bias-*,workload'
    """
    try:
        chosen = select(names)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    Console().print(table(chosen))
