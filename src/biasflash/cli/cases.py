"""``biasflash cases``: what check, bench and tune can be asked for by name."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

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


def table(tags: str, chosen: Sequence[Case]) -> Table:
    """The cases of the same tags: two columns, so that a narrow terminal shows them, too."""
    found = Table(
        title=f"{tags}: {len(chosen)} case{'s' if len(chosen) > 1 else ''}; *B x M x Hq x D in brackets",
        title_justify="left",
        box=None,
        show_header=False,
        pad_edge=False,
    )
    found.add_column(no_wrap=True)
    found.add_column(overflow="fold")
    for case in chosen:
        facts = ", ".join(filter(None, (sizes(case), terms(case))))
        found.add_row(case.name, Text.assemble(case.why, (f" ({facts})", "dim")))
    return found


def _tags(case: Case) -> str:
    return ", ".join(sorted(case.tags))


def cases(
    names: Annotated[
        str, typer.Argument(help="Comma-separated names, globs or tags (smoke, check, workload, big, all).")
    ] = "all",
) -> None:
    """List the named cases that check, bench and tune take with --cases.

    Example: biasflash cases 'bias-*,workload'
    """
    try:
        chosen = select(names)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    groups = itertools.groupby(sorted(chosen, key=_tags), key=_tags)
    Console().print(Group(*(table(tags, list(found)) for tags, found in groups)))
