"""Tables and pictures of the pages, printed from the code: ``python -m biasflash.cli.support FILES`` rewrites them.

A generated block stands between ``<!-- NAME:start -->`` and ``<!-- NAME:end -->``, where NAME is one of ``BLOCKS``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

import biasflash
from biasflash.backends import ORDER, load
from biasflash.bias import KINDS
from biasflash.problem import AXES, short

#: what each row of the axis table is, beside the letters
_MEANING = {
    "q": "queries",
    "k": "keys",
    "v": "values",
    "qkv": "packed: q, k and v on the third axis from the right; M = N = L, Hq = Hkv = H",
    "kv": "packed: k and v on the third axis from the right; Dv = D",
    "bias": "added to the scores; float, may be trained",
    "mask": "boolean, True = may attend",
    "out": "result, in q's dtype",
    "lse": "log-sum-exp of the scores, natural logarithm, float32 (float64 for float64 inputs)",
}


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _dtypes(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(short(d) for d in dtypes)


def backends() -> str:
    """Every backend in order of preference, with what it promises."""
    rows = []
    for name in ORDER:
        p = load(name).PROMISES
        repeatable = "yes" if p.deterministic else "no"
        rows.append((f"`{name}`", p.devices, _dtypes(p.dtypes), f"1 to {p.max_width}", p.memory, repeatable, p.summary))
    return _table(
        ("backend", "runs on", "dtypes of q, k, v", "D, Dv", "memory", "same bits every run", "what it is"), rows
    )


def kinds() -> str:
    """Every kind of score term."""
    rows = [(f"`{k.argument}=`", k.name, _dtypes(k.dtypes), "yes" if k.trainable else "no") for k in KINDS.values()]
    return _table(("argument", "kind", "dtypes", "may be trained"), rows)


def axes() -> str:
    """The axis table."""
    return _table(("tensor", "axes", "meaning"), [(f"`{n}`", f"`{a}`", _MEANING[n]) for n, a in AXES.items()])


def seen(causal: bool | str, M: int, N: int, mask: Tensor | None = None) -> Tensor:
    """Which keys each query sees, ``(M, N)`` boolean, asked of ``attention`` itself by one-hot values."""
    q, k, v = torch.zeros(M, 1, 1), torch.zeros(N, 1, 1), torch.eye(N)[:, None, :]
    out = biasflash.attention(q, k, v, mask=mask, causal=causal)
    assert isinstance(out, Tensor)
    return out[:, 0, :] > 0


def causal() -> str:
    """Both causal alignments, for more keys than queries and for more queries than keys."""
    parts = []
    for M, N in ((3, 5), (5, 3)):
        left, right = seen("bottom-right", M, N), seen("top-left", M, N)
        lines = [f"M = {M}, N = {N}", f"{'bottom-right':<16}{'top-left'}"]
        for a, b in zip(left.int().tolist(), right.int().tolist(), strict=True):
            lines.append(f"{' '.join(map(str, a)):<16}{' '.join(map(str, b))}")
        parts.append("\n".join(lines))
    return "```text\n" + "\n\n".join(parts) + "\n```"


#: name of a generated block -> what writes it
BLOCKS: dict[str, Callable[[], str]] = {"backends": backends, "kinds": kinds, "axes": axes, "causal": causal}


def fill(text: str, writers: Mapping[str, Callable[[], str]] = BLOCKS) -> str:
    """The text of a page with every generated block as its writer has it today.

    Raises:
        ValueError: a block has a start and no end.
    """
    for name, write in writers.items():
        start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
        if start in text:
            before, _, rest = text.partition(start)
            _, found, after = rest.partition(end)
            if not found:
                raise ValueError(f"{start} has no {end}")
            text = f"{before}{start}\n{write()}\n{end}{after}"
    return text


def main(files: Sequence[str]) -> None:
    """Rewrites the named pages; without a name prints every block."""
    for name in files:
        path = Path(name)
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")
    if not files:
        print("\n\n".join(write() for write in BLOCKS.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
