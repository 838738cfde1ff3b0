"""Facts and checks of a call: the hash of a problem, each door's own words, and sizes that are symbols."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import biasflash
from biasflash import problem
from biasflash.problem import Problem


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


# ----------------------------------------------------------------------------------------------------------- the noun


def facts(M: int = 8) -> Problem:
    return problem.build(t(2, M, 4, 16), t(2, 6, 2, 16), t(2, 6, 2, 12), [t(M, 6)], ["dense"], "top-left", None)


def test_equal_problems_have_equal_hashes_and_others_differ() -> None:
    assert facts() == facts()
    assert hash(facts()) == hash(facts())
    assert facts() != facts(9)
    assert hash(facts()) != hash(facts(9))


def test_the_hash_is_computed_once() -> None:
    class Counted(float):
        asked = 0

        def __hash__(self) -> int:
            Counted.asked += 1
            return float.__hash__(self)

    one = dataclasses.replace(facts(), scale=Counted(0.25))
    table = {one: "found"}
    assert [table[one] for _ in range(3)] == ["found"] * 3
    assert Counted.asked == 1


@pytest.mark.parametrize("again", [lambda p: pickle.loads(pickle.dumps(p)), copy.copy, copy.deepcopy])
def test_copies_are_equal_and_carry_no_hash(again: Callable[[Problem], Problem]) -> None:
    """Text hashes by another seed in every process, so a kept hash must not travel."""
    one = facts()
    kept = hash(one)
    two = again(one)
    assert "_hash" not in vars(two)
    assert two == one
    assert hash(two) == kept
    assert repr(two) == repr(one)


def test_a_replaced_fact_changes_the_hash() -> None:
    one = facts()
    hash(one)
    two = dataclasses.replace(one, M=9, terms=())
    assert two == dataclasses.replace(facts(), M=9, terms=())
    assert hash(two) == hash(dataclasses.replace(facts(), M=9, terms=())) != hash(one)


# ------------------------------------------------------------------------------------------------- each door's words

sdpa: Any = biasflash.scaled_dot_product_attention
packed: Any = biasflash.attention_qkvpacked
kvpacked: Any = biasflash.attention_kvpacked
historic: Any = biasflash.flash_attention_fn
historic_packed: Any = biasflash.flash_attention_qkvpacked_fn
HALF, INT, BOOL = torch.float16, torch.int64, torch.bool

#: name, the wrong call, the error, words of its message, arguments of other doors, which it must not speak of
WORDS: list[tuple[str, Callable[[], object], type[Exception], tuple[str, ...], tuple[str, ...]]] = [
    (
        "torch's door, key is text",
        lambda: sdpa(t(2, 4, 8, 16), "key", t(2, 4, 8, 16)),
        TypeError,
        ("key must be a torch.Tensor of axes (*B Hkv N D)", "got str"),
        ("k",),
    ),
    (
        "torch's door, value is None",
        lambda: sdpa(t(2, 4, 8, 16), t(2, 4, 8, 16), None),
        TypeError,
        ("value must be a torch.Tensor of axes (*B Hkv N Dv)",),
        ("v",),
    ),
    (
        "torch's door, integers",
        lambda: sdpa(t(2, 4, 8, 16), t(2, 4, 8, 16, dtype=INT), t(2, 4, 8, 16)),
        TypeError,
        ("key has dtype int64",),
        ("k",),
    ),
    (
        "torch's door, two dtypes",
        lambda: sdpa(t(2, 4, 8, 16), t(2, 4, 8, 16, dtype=HALF), t(2, 4, 8, 16)),
        TypeError,
        ("query, key and value must share one dtype", ".to(query.dtype)"),
        ("q", "k", "v"),
    ),
    (
        "torch's door, two devices",
        lambda: sdpa(t(2, 4, 8, 16), t(2, 4, 8, 16), t(2, 4, 8, 16).to("meta")),
        ValueError,
        ("query, key and value must be on one device, got cpu, cpu, meta",),
        ("q", "k", "v"),
    ),
    (
        "torch's door, batch axes",
        lambda: sdpa(t(2, 4, 8, 16), t(3, 4, 6, 16), t(3, 4, 6, 16)),
        ValueError,
        ("same batch axes", "query (2, 4, 8, 16) = (*B Hq M D)", "key (3, 4, 6, 16) = (*B Hkv N D)"),
        ("q", "k", "v"),
    ),
    (
        "torch's door, lengths",
        lambda: sdpa(t(2, 4, 8, 16), t(2, 4, 6, 16), t(2, 4, 7, 16)),
        ValueError,
        ("key (2, 4, 6, 16) and value (2, 4, 7, 16) differ in axis N: 6 and 7",),
        ("q", "k", "v"),
    ),
    (
        "torch's door, widths",
        lambda: sdpa(t(2, 4, 8, 16), t(2, 4, 6, 15), t(2, 4, 6, 15)),
        ValueError,
        ("query (2, 4, 8, 16) and key (2, 4, 6, 15) differ in axis D: 16 and 15",),
        ("q", "k"),
    ),
    (
        "torch's door, grouped heads unasked",
        lambda: sdpa(t(2, 4, 8, 16), t(2, 2, 6, 16), t(2, 2, 6, 16)),
        ValueError,
        ("query (2, 4, 8, 16) has Hq = 4", "Hkv = 2", "enable_gqa=True"),
        ("q", "k"),
    ),
    (
        "torch's door, heads do not divide",
        lambda: sdpa(t(2, 3, 8, 16), t(2, 2, 6, 16), t(2, 2, 6, 16), enable_gqa=True),
        ValueError,
        ("query (2, 3, 8, 16) has Hq = 3", "layout is (*B, heads, length, width)", "biasflash.attention"),
        ("q", "k"),
    ),
    (
        "torch's door, no key heads",
        lambda: sdpa(t(2, 4, 8, 16), t(2, 0, 6, 16), t(2, 0, 6, 16), enable_gqa=True),
        ValueError,
        ("key of shape (2, 0, 6, 16) has Hkv = 0; Hkv must be at least 1",),
        ("q", "k"),
    ),
    (
        "torch's door, too wide",
        lambda: sdpa(t(2, 4, 8, 16), t(2, 4, 8, 16), t(2, 4, 8, 300)),
        biasflash.UnsupportedError,
        ("value of shape (2, 4, 8, 300) has axis Dv = 300",),
        ("v",),
    ),
    (
        "torch's door, mask of another length",
        lambda: sdpa(t(2, 4, 8, 16), t(2, 4, 6, 16), t(2, 4, 6, 16), t(2, 1, 8, 7)),
        ValueError,
        ("attn_mask of shape (2, 1, 8, 7) does not broadcast", "axis N is 7"),
        ("bias", "mask"),
    ),
    (
        "torch's door, mask of batch and keys",
        lambda: sdpa(t(2, 4, 8, 16), t(2, 4, 6, 16), t(2, 4, 6, 16), t(2, 6, dtype=BOOL)),
        ValueError,
        ("attn_mask of shape (2, 6)", "attn_mask[:, None, None, :]"),
        ("bias",),
    ),
    (
        "torch's door, mask of integers",
        lambda: sdpa(t(2, 4, 8, 16), t(2, 4, 6, 16), t(2, 4, 6, 16), t(8, 6, dtype=INT)),
        TypeError,
        ("attn_mask has dtype int64", "float32", "bool"),
        ("bias", "mask"),
    ),
    (
        "torch's door, mask is a number",
        lambda: sdpa(t(2, 4, 8, 16), t(2, 4, 6, 16), t(2, 4, 6, 16), 1.0),
        TypeError,
        ("attn_mask must be a torch.Tensor", "got float"),
        ("bias", "mask"),
    ),
    (
        "torch's door, mask elsewhere",
        lambda: sdpa(t(2, 4, 8, 16), t(2, 4, 6, 16), t(2, 4, 6, 16), t(8, 6).to("meta")),
        ValueError,
        ("attn_mask is on meta, query is on cpu", ".to(query.device)"),
        ("q", "bias", "mask"),
    ),
    (
        "torch's door, alignment in words",
        lambda: sdpa(*(t(2, 4, 8, 16),) * 3, is_causal="bottom-right"),
        TypeError,
        ("is_causal must be True (top-left) or False", "got str"),
        ("causal",),
    ),
    (
        "packed, integers",
        lambda: packed(t(2, 8, 3, 4, 16, dtype=INT)),
        TypeError,
        ("qkv has dtype int64",),
        ("q", "k", "v"),
    ),
    (
        "packed, no heads",
        lambda: packed(t(2, 8, 3, 0, 16)),
        ValueError,
        ("qkv of shape", "H must be at least 1"),
        ("q",),
    ),
    (
        "packed, too wide",
        lambda: packed(t(2, 8, 3, 4, 300)),
        biasflash.UnsupportedError,
        ("qkv of shape (2, 8, 3, 4, 300) has axis D = 300",),
        ("q", "v", "Dv"),
    ),
    (
        "packed, bias elsewhere",
        lambda: packed(t(2, 8, 3, 4, 16), t(8, 8).to("meta")),
        ValueError,
        ("bias is on meta, qkv is on cpu", ".to(qkv.device)"),
        ("q",),
    ),
    (
        "keys packed, two dtypes",
        lambda: kvpacked(t(2, 8, 4, 16), t(2, 6, 2, 2, 16, dtype=HALF)),
        TypeError,
        ("q and kv must share one dtype, got float32, float16",),
        ("k", "v"),
    ),
    (
        "keys packed, batch axes",
        lambda: kvpacked(t(2, 8, 4, 16), t(3, 6, 2, 2, 16)),
        ValueError,
        ("q and kv must have the same batch axes", "kv (3, 6, 2, 2, 16) = (*B N 2 Hkv D)"),
        ("k", "v"),
    ),
    (
        "keys packed, number of batch axes",
        lambda: kvpacked(t(8, 4, 16), t(2, 6, 2, 2, 16)),
        ValueError,
        ("q and kv must have the same batch axes",),
        ("k", "v"),
    ),
    (
        "keys packed, heads do not divide",
        lambda: kvpacked(t(2, 8, 3, 16), t(2, 6, 2, 2, 16)),
        ValueError,
        ("q (2, 8, 3, 16) has Hq = 3", "kv (2, 6, 2, 2, 16) has Hkv = 2"),
        ("k", "v"),
    ),
    (
        "keys packed, widths",
        lambda: kvpacked(t(2, 8, 4, 16), t(2, 6, 2, 2, 8)),
        ValueError,
        ("q (2, 8, 4, 16) and kv (2, 6, 2, 2, 8) differ in axis D: 16 and 8",),
        ("k", "v"),
    ),
    (
        "historic door, factor is text",
        lambda: historic(*(t(2, 8, 4, 16),) * 3, sm_scale="auto"),
        TypeError,
        ("sm_scale must be a number or None",),
        ("scale",),
    ),
    (
        "historic packed door, factor is infinite",
        lambda: historic_packed(t(2, 8, 3, 4, 16), sm_scale=float("inf")),
        ValueError,
        ("sm_scale must be finite, got inf",),
        ("scale",),
    ),
    (
        "historic door, mask of batch and keys",
        lambda: historic(*(t(2, 8, 4, 16),) * 3, t(2, 8, dtype=BOOL)),
        ValueError,
        ("bias of shape (2, 8)", "bias[:, None, None, :]"),
        ("mask[",),
    ),
]


@pytest.mark.parametrize(("call", "error", "words", "foreign"), [w[1:] for w in WORDS], ids=[w[0] for w in WORDS])
def test_messages_speak_of_the_callers_arguments(
    call: Callable[[], object], error: type[Exception], words: tuple[str, ...], foreign: tuple[str, ...]
) -> None:
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is error
    assert [word for word in words if word not in message] == [], message
    assert [word for word in foreign if re.search(rf"(?<![\w.*]){re.escape(word)}(?!\w)", message)] == [], message
    assert caught.value.__context__ is None


def test_no_hint_for_a_layout_that_the_call_does_not_have() -> None:
    """Without a batch axis, or with two, inserting one axis would not help."""
    for batch in ((), (2, 3)):
        q = t(*batch, 8, 4, 16)
        with pytest.raises(ValueError, match=r"wanted 1 or \d$"):
            biasflash.attention(q, q, q, mask=t(2, 8, dtype=BOOL))


def test_options_not_built_show_no_elements() -> None:
    lengths = torch.arange(40)
    with pytest.raises(biasflash.UnsupportedError) as caught:
        biasflash.attention(*(t(40, 8, 4, 16),) * 3, kv_lens=lengths)
    assert str(caught.value) == "kv_lens=int64 tensor of shape (40,) is not built yet; accepted: kv_lens=None"
    pair: Any = [lengths, None]
    with pytest.raises(biasflash.UnsupportedError, match=r"^window=list of int64 tensor of shape \(40,\), None is not"):
        biasflash.attention(*(t(40, 8, 4, 16),) * 3, window=pair)


def test_dropout_must_be_zero_and_not_absent() -> None:
    with pytest.raises(biasflash.UnsupportedError, match=r"dropout_p=None is not built yet; accepted: dropout_p=0.0"):
        biasflash.attention(*(t(2, 8, 4, 16),) * 3, dropout_p=None)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------- sizes that are symbols


class Learned(nn.Module):
    """Parameters have plain sizes in a graph whose inputs have symbolic ones."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.tensor = nn.Parameter(torch.randn(shape))


class LearnedBias(Learned):
    def forward(self, q: Tensor) -> Any:
        return biasflash.attention(q, q, q, self.tensor)


class LearnedKeys(Learned):
    def forward(self, q: Tensor) -> Any:
        return biasflash.attention(q, self.tensor, self.tensor)


class LearnedQueriesForTorch(Learned):
    def forward(self, k: Tensor) -> Any:
        return biasflash.scaled_dot_product_attention(self.tensor, k, k, enable_gqa=True)


@pytest.mark.parametrize(
    "module",
    [
        LearnedBias(4, 6, 6),
        LearnedBias(4, 1, 6),
        LearnedBias(2, 1, 6, 1),
        LearnedBias(6),
        LearnedKeys(2, 5, 2, 8),
        LearnedQueriesForTorch(2, 12, 3, 8),
    ],
    ids=lambda m: f"{type(m).__name__}{tuple(m.tensor.shape)}",
)
def test_plain_sizes_meet_symbolic_ones(module: Learned) -> None:
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    x = torch.randn(2, 6, 4, 8)
    found, wanted = compiled(x), module(x)
    torch.testing.assert_close(found, wanted)
    (got,) = torch.autograd.grad(found.sin().sum(), module.tensor)
    torch.testing.assert_close(got, torch.autograd.grad(wanted.sin().sum(), module.tensor)[0])


def test_wrong_symbolic_sizes_are_still_refused() -> None:
    compiled = torch.compile(biasflash.attention, backend="aot_eager", fullgraph=True, dynamic=True)
    q = torch.randn(2, 6, 4, 8)
    with pytest.raises(Exception, match="axis M is 5, wanted 1 or"):
        compiled(q, q, q, torch.zeros(4, 5, 6))
    with pytest.raises(Exception, match="differ in axis N"):
        compiled(q, q, torch.randn(2, 7, 4, 8))


def test_the_factor_may_be_an_argument_of_the_graph() -> None:
    """The operator's schema fixes it in each graph; the checks before it must not break the trace."""
    compiled = torch.compile(biasflash.attention, backend="aot_eager", fullgraph=True, dynamic=True)
    q = torch.randn(2, 6, 4, 8)
    for scale in (0.25, 0.5, -2.0):
        torch.testing.assert_close(compiled(q, q, q, scale=scale), biasflash.attention(q, q, q, scale=scale))
    for wrong in (float("inf"), float("-inf"), float("nan")):
        with pytest.raises(Exception, match="scale must be finite"):
            compiled(q, q, q, scale=wrong)


def test_a_term_of_batch_and_keys_is_told_how_to_broadcast() -> None:
    q, k = torch.zeros(2, 48, 4, 8), torch.zeros(2, 64, 4, 8)
    for term, kind in ((torch.zeros(2, 64), "bias"), (torch.ones(2, 64, dtype=torch.bool), "mask")):
        with pytest.raises(ValueError, match=rf"for a \(B, N\) key {kind} write {kind}\[:, None, None, :\]"):
            biasflash.attention(q, k, k, **{kind: term})
    with pytest.raises(ValueError, match=r"axis M is 2, wanted 1 or 48$"):
        biasflash.attention(q, k, k, torch.zeros(2, 1))


def test_a_hint_taken_at_its_word_makes_the_call_work() -> None:
    """Of random shapes that do not fit: what a message says to write for the term, if it does, fits."""
    draw = random.Random(0)
    taken: set[str] = set()
    for _ in range(1500):
        batch = [draw.randint(1, 4) for _ in range(draw.choice((0, 1, 1, 1, 2)))]
        M, N, H = (draw.randint(1, 5) for _ in range(3))
        sizes = (1, M, N, H, *batch, (batch or [1])[0] * H)
        term = torch.zeros([draw.choice(sizes) for _ in range(draw.randint(1, 4))])
        q, k = torch.zeros(*batch, M, H, 4), torch.zeros(*batch, N, H, 4)
        try:
            biasflash.attention(q, k, k, term)
            continue
        except ValueError as error:
            hint = re.search(r"bias(\[:, None.*\]|\.movedim\(.*\)|\.unflatten\(.*\))$", str(error))
        if hint is not None:
            biasflash.attention(q, k, k, eval(hint[0], {"bias": term}))
            taken.add(re.sub(r"\d+", "n", hint[1]))
    assert taken == {"[:, None]", "[:, None, None, :]", ".movedim(-n, -n)", ".unflatten(n, (n, n))"}
