"""The ``biasflash`` program: its commands are registered here, and live in modules of their own."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn


def _refuse(missing: str) -> NoReturn:
    sys.exit(f"the command line of biasflash needs {missing}; install it with: pip install 'biasflash[cli]'")


def _build() -> Any:
    """The typer program, or a function that says what to install."""
    try:
        import rich  # noqa: F401
        import typer
    except ImportError as error:
        missing = error.name or "typer"
        return lambda: _refuse(missing)

    from biasflash._version import __version__
    from biasflash.cli.bench import bench
    from biasflash.cli.cases import cases
    from biasflash.cli.check import check
    from biasflash.cli.demo import demo
    from biasflash.cli.explain import explain
    from biasflash.cli.sweep import sweep
    from biasflash.cli.tune import tune

    program = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # the other modes keep the line ends of docstrings
        help="Exact fused attention with additive biases, boolean masks and trainable-bias gradients.",
    )
    for command in (check, bench, explain, cases, tune, sweep, demo):
        program.command(command.__name__)(command)

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(__version__)
            raise typer.Exit()

    @program.callback()
    def options(
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Show the version."
        ),
    ) -> None:
        # commands make many kinds of call, each at one length: kernels of other lengths (``backends.triton.ahead``)
        # would double what they compile
        os.environ.setdefault("BIASFLASH_AHEAD", "off")

    return program


app = _build()


if __name__ == "__main__":
    app()
