"""The second witness: Shardy's own factors of every operation, against those of the rules.

What is compared is which dimensions of operands and results belong together, which are reduced, and which neighbours
or all devices have to exchange. `tests.factors` asks Shardy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

from autoshard import jaxpr as jx
from autoshard.ir.rule import Rule, parse
from autoshard.ir.spec import REDUCTION_KINDS
from autoshard.rules import TABLE
from autoshard.rules.validation.samples import Sample, samples
from tests.factors import Map, canonical, theirs

NOT_SAMPLED = {"from_edtype", "to_edtype", "with_memory_space_constraint"}
"""They occur only while JAX differentiates, or only on an accelerator."""


def ours(eqn: jx.JaxprEqn) -> Map:
    rule = TABLE[eqn.primitive](*(a.aval for a in eqn.invars), **eqn.params)
    sizes = rule.factor_sizes([a.aval.shape for a in (*eqn.invars, *eqn.outvars)])
    return canonical((*rule.operands, *rule.results), partial(kind_of, rule), sizes.__getitem__)


def kind_of(rule: Rule, factor: str) -> str:
    kind = rule.kind(factor)
    return {**dict.fromkeys(REDUCTION_KINDS, "reduced"), "halo": "moved", "local": "moved"}.get(kind, kind)


def equation(sample: Sample) -> jx.JaxprEqn | None:
    """The equation that the sample is for; None where this JAX has no such primitive, or traces it to nothing."""
    if jx.find_primitive(sample.name) is None:
        return None
    eqns = jx.normalize(jax.make_jaxpr(sample.fn)(*sample.args)).eqns
    return next((e for e in reversed(eqns) if e.primitive.name == sample.name), None)


_BY_REASON: dict[str, tuple[str, ...]] = {
    "Shardy splits what is cut or windowed at any place and lets XLA move the parts; ours says so where a neighbour's "
    "edge or a local form is enough, and else keeps the dimension whole": (
        "conv_general_dilated",
        "pad",
        "rev",
        "slice",
    ),
    "windows that do not overlap need nothing of their neighbours; Shardy moves all windows": (
        "reduce_window",
        "reduce_window_max",
        "reduce_window_min",
        "reduce_window_sum",
        "select_and_gather_add",
        "select_and_scatter",
        "select_and_scatter_add",
    ),
    "split in a local form; Shardy has the dimension whole": ("concatenate", "sort", "tile"),
    "Shardy calls it reduced, but no collective combines the terms": (
        "argmax",
        "argmin",
        "reduce",
        "reduce_and",
        "reduce_or",
        "reduce_xor",
    ),
    "the sizes before and after do not nest: Shardy moves the part that they share": ("reshape",),
    "a loop that ends when all elements are done: Shardy sees the reduction of its condition": (
        "igamma",
        "igamma_grad_a",
        "igammac",
        "random_gamma",
        "regularized_incomplete_beta",
    ),
    "lowered to a loop that updates rows in place: Shardy sees the steps": (
        "cholesky_update",
        "lu",
        "lu_pivots_to_permutation",
    ),
    "lowered to an operation of XLA for which Shardy has no rule": (
        "erf",
        "mulhi",
        "philox2x32",
        "philox4x32",
        "scaled_dot",
        "top_k",
    ),
    "lowered to a library's call, of which Shardy knows the batch alone; the right-hand sides are apart too": (
        "triangular_solve",
        "tridiagonal_solve",
    ),
    "on this platform it is spelled out as a masked product of every group; elsewhere it is a kernel, whose groups "
    "are data": ("ragged_dot_general",),
    "it says how its operand is sharded on another mesh, of which Shardy does not know": ("reshard",),
    "one factor stands twice in a value, which a sharding cannot say; ours keeps both whole": ("symmetric_product",),
}
REASONS = {name: reason for reason, names in _BY_REASON.items() for name in names}
"""Why a primitive's rule has other factors than Shardy."""
SOME_VERSIONS = {"cholesky_update"}
"""Different in some of the supported versions of JAX, equal in others."""


@dataclass(frozen=True)
class Compared:
    """One program."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    ours: Map
    theirs: Map

    @property
    def agree(self) -> bool:
        return self.ours == self.theirs

    def __str__(self) -> str:
        return f"{self.name} {list(self.shapes)}: {self.ours}; Shardy: {self.theirs}"


def compared(programs: Iterable[Sample]) -> Iterator[Compared]:
    for sample in programs:
        eqn = equation(sample)
        if eqn is not None:
            yield Compared(sample.name, tuple(a.aval.shape for a in eqn.invars), ours(eqn), theirs(eqn))


@pytest.fixture(scope="module")
def all_samples() -> list[Compared]:
    with jax.enable_x64(True):
        return list(compared(samples()))


def test_shardy_agrees_or_the_difference_has_its_reason(all_samples: list[Compared], capsys: Any) -> None:
    assert [str(c) for c in all_samples if not c.agree and c.name not in REASONS] == []
    differ = {c.name for c in all_samples if not c.agree}
    names = {c.name for c in all_samples}
    with capsys.disabled():
        print(
            f"\nShardy: {sum(c.agree for c in all_samples)} of {len(all_samples)} programs agree; of {len(names)} "
            f"primitives {len(names - differ)} in every program, {len(differ)} differ with a reason"
        )
    assert len(names - differ) >= 140


def test_every_rule_has_met_shardy(all_samples: list[Compared]) -> None:
    assert {p.name for p in TABLE} - {c.name for c in all_samples} == NOT_SAMPLED


def test_no_reason_is_stale(all_samples: list[Compared]) -> None:
    differ = {c.name for c in all_samples if not c.agree}
    assert sorted(set(REASONS) - differ - SOME_VERSIONS) == []


def test_agreement_is_about_something(all_samples: list[Compared]) -> None:
    """Most of what agrees couples dimensions of an operand and a result."""
    coupled = [c for c in all_samples if c.agree and c.ours.kinds]
    assert len(coupled) > 200
    assert len({c.ours for c in coupled}) > 50
    assert {k for c in coupled for k in c.ours.kinds} == {"parallel", "reduced", "moved"}


SEEDS = range(24)


def drawn(seed: int) -> Iterator[Sample]:
    """Programs of random shapes, one or more for each primitive whose rule depends on shapes or parameters."""
    rng = np.random.default_rng(seed)

    def some(rank: int) -> list[int]:
        return [int(n) for n in rng.choice([1, 2, 3, 4, 6, 8, 12], rank)]

    def array(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def order(n: int) -> list[int]:
        return [int(i) for i in rng.permutation(n)]

    rank = int(rng.integers(1, 5))
    shape = some(rank)
    x, axis = array(*shape), int(rng.integers(rank))
    axes = tuple(sorted(order(rank)[: int(rng.integers(1, rank + 1))]))
    for op in (lax.tanh, lax.neg, lax.floor, lax.is_finite):
        yield Sample(op.__name__, op, (x,))
    for op in (lax.add, lax.mul, lax.div, lax.lt, lax.max):
        yield Sample(op.__name__, op, (x, x))
    yield Sample("select_n", lax.select_n, (array(*shape, dtype=np.bool_), x, x))
    yield Sample("convert_element_type", partial(lax.convert_element_type, new_dtype=np.int32), (x,))
    for op in (lax.reduce_sum, lax.reduce_max, lax.reduce_min, lax.reduce_prod):
        yield Sample(op.__name__, partial(op, axes=axes), (x,))
    for op in (lax.argmax, lax.argmin):
        yield Sample(op.__name__, partial(op, axis=axis, index_dtype=np.int32), (x,))
    for op in (lax.cumsum, lax.cummax, lax.cumprod, lax.cumlogsumexp):
        yield Sample(op.__name__, partial(op, axis=axis), (x,))
    yield Sample("transpose", partial(lax.transpose, permutation=order(rank)), (x,))
    yield Sample("rev", partial(lax.rev, dimensions=axes), (x,))
    yield Sample("sort", partial(lax.sort, dimension=axis), (x,))
    yield Sample("top_k", lambda x: lax.top_k(x, 1, axis=axis), (x,))
    at = tuple(sorted(order(rank + 2)[:rank]))
    wide = some(rank + 2)
    small = [wide[d] if rng.integers(2) else 1 for d in at]
    yield Sample(
        "broadcast_in_dim", partial(lax.broadcast_in_dim, shape=wide, broadcast_dimensions=at), (array(*small),)
    )
    yield Sample("squeeze", partial(lax.squeeze, dimensions=(axis,)), (array(*shape[:axis], 1, *shape[axis + 1 :]),))
    cuts = sorted({0, rank, *(int(c) for c in rng.integers(0, rank + 1, 2))})
    merged = [int(np.prod(shape[i:j])) for i, j in itertools.pairwise(cuts)]
    yield Sample("reshape", partial(lax.reshape, new_sizes=merged), (x,))
    yield Sample("reshape", partial(lax.reshape, new_sizes=shape), (array(*merged),))
    other = [*shape]
    other[axis] = some(1)[0]
    yield Sample("concatenate", lambda a, b: lax.concatenate((a, b), axis), (x, array(*other)))
    starts = [int(rng.integers(n)) for n in shape]
    stops = [int(rng.integers(b + 1, n + 1)) for b, n in zip(starts, shape, strict=True)]
    yield Sample("slice", partial(lax.slice, start_indices=starts, limit_indices=stops), (x,))
    yield Sample("pad", lambda x, v: lax.pad(x, v, [(int(d == axis), 0, 0) for d in range(rank)]), (x, array()))
    yield Sample("iota", lambda: lax.broadcasted_iota(np.int32, shape, axis), ())
    b, m, n, k = some(1), some(int(rng.integers(3))), some(int(rng.integers(3))), some(int(rng.integers(1, 3)))
    yield dot(rng, b * int(rng.integers(2)), m, n, k)
    size, width = some(1)[0] + 1, some(1)[0]
    take = lax.GatherDimensionNumbers(offset_dims=(rank,), collapsed_slice_dims=(0,), start_index_map=(0,))
    yield Sample(
        "gather",
        partial(lax.gather, dimension_numbers=take, slice_sizes=(1, width), mode="clip"),
        (array(size, width), array(*shape, 1, dtype=np.int32)),
    )
    rows = lax.ScatterDimensionNumbers((rank,), (0,), (0,))
    yield Sample(
        "scatter-add",
        partial(lax.scatter_add, dimension_numbers=rows),
        (array(size, width), array(*shape, 1, dtype=np.int32), array(*shape, width)),
    )
    yield Sample(
        "dynamic_slice", lambda x, *i: lax.dynamic_slice(x, i, stops), (x, *(array(dtype=np.int32) for _ in shape))
    )
    batch, inside, outside, window = *some(3), int(rng.integers(1, 4))
    yield Sample(
        "conv_general_dilated",
        partial(
            lax.conv_general_dilated,
            window_strides=(1,),
            padding="SAME" if window % 2 else "VALID",
            dimension_numbers=("NHC", "HIO", "NHC"),
        ),
        (array(batch, 12, inside), array(window, inside, outside)),
    )


def dot(rng: np.random.Generator, b: Sequence[int], m: Sequence[int], n: Sequence[int], k: Sequence[int]) -> Sample:
    """A product with its dimensions in random order."""

    def operand(free: Sequence[int]) -> tuple[tuple[int, ...], list[int]]:
        sizes = [*b, *k, *free]
        order = [int(i) for i in rng.permutation(len(sizes))]
        return tuple(sizes[i] for i in order), [order.index(i) for i in range(len(sizes))]

    (lhs, at), (rhs, to) = operand(m), operand(n)
    nb, nk = len(b), len(b) + len(k)
    numbers = ((at[nb:nk], to[nb:nk]), (at[:nb], to[:nb]))
    return Sample(
        "dot_general",
        partial(lax.dot_general, dimension_numbers=numbers),
        (jax.ShapeDtypeStruct(lhs, np.float32), jax.ShapeDtypeStruct(rhs, np.float32)),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_random_shapes(seed: int) -> None:
    programs = list(compared(drawn(seed)))
    assert len(programs) > 30
    assert [str(c) for c in programs if not c.agree and c.name not in REASONS] == []


@pytest.mark.parametrize(
    ("name", "fn", "shapes", "expected"),
    [
        ("dot_general", lax.dot, [(4, 6), (6, 2)], "ab, bc, ac {b: reduced}"),
        ("reshape", lambda x: x.reshape(4, 12), [(4, 6, 2)], "abc, a(bc)"),
        ("cumsum", lambda x: lax.cumsum(x, 1), [(4, 6)], "ab, ab {b: moved}"),
        ("cholesky", lax.linalg.cholesky, [(6, 4, 4)], "a.., a.."),
    ],
)
def test_what_the_witness_says(name: str, fn: Any, shapes: Any, expected: str) -> None:
    eqn = equation(Sample(name, fn, tuple(jax.ShapeDtypeStruct(s, np.float32) for s in shapes)))
    assert str(theirs(eqn)) == expected


def test_a_wrong_rule_would_be_seen() -> None:
    eqn = equation(Sample("dot_general", lax.dot, (np.ones((4, 6), "f4"), np.ones((6, 2), "f4"))))
    for text in ("ab, bc -> ac", "ab, cd -> ad {b: sum}", "ab, bc -> ac {a: sum, b: sum}", "a., .c -> ac"):
        rule = parse(text)
        sizes = {**dict(zip("abc", (4, 6, 2), strict=True)), "c": 2, "d": 2}
        assert canonical((*rule.operands, *rule.results), partial(kind_of, rule), sizes.__getitem__) != theirs(eqn)
