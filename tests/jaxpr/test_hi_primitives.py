"""High-level primitives: their bodies are read and replaced, their autodiff rules stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.hijax import HiPrim, HiType, ShapedArray, register_hitype
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import jaxpr as jx
from autoshard.backend.audit import audit
from autoshard.backend.hlo.collectives import collectives
from autoshard.errors import RuleError
from autoshard.rules import SHIPPED
from autoshard.transforms.remat import is_recomputable
from tests.programs import graph, mesh

ROWS, EIGHT = P("x"), {"x": 8}


class Halves(HiPrim):
    """``x * scale`` and its rows' sums, with another derivative than its body's: twice the tangent."""

    def __init__(self, x: Any, scale: float) -> None:
        self.in_avals = (x,)
        self.out_aval = (x, x.update(shape=x.shape[:1]))
        self.params = {"scale": scale}
        super().__init__()

    def expand(self, x: Any) -> Any:
        y = x * self.params["scale"]
        return y, y.sum(1)

    def jvp(self, primals: Any, tangents: Any) -> Any:
        (t,) = tangents
        return self(*primals), (2 * t, t.sum(1))

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        del axis_data
        rows, (dim,) = jnp.concatenate(list(jnp.moveaxis(args[0], dims[0], 0))), dims
        y, sums = halves(rows, self.params["scale"])
        return (y.reshape(-1, *self.in_avals[0].shape), sums.reshape(-1, self.in_avals[0].shape[0])), (dim * 0, 0)


def halves(x: Any, scale: float = 0.5) -> Any:
    return Halves(jax.typeof(x), scale)(x)


def real(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype("float32")


def only(jaxpr: Any) -> jx.JaxprEqn:
    (eqn,) = [e for e in jaxpr.eqns if e.primitive is jx.CALL_HI_PRIMITIVE]
    return eqn


def test_normalize_traces_the_body_into_the_equation() -> None:
    jaxpr = jx.normalize(jax.make_jaxpr(lambda x: halves(jnp.sin(x)))(real(4, 6)))
    jx.check_jaxpr(jaxpr)
    eqn = only(jaxpr)
    (region,) = jx.regions(eqn)
    assert [e.primitive.name for e in region.body.eqns] == ["mul", "reduce_sum"]
    assert {jx.source(e) for e in region.body.eqns} == {jx.source(eqn)}
    assert list(jx.subjaxprs(eqn)) == [region.body]
    assert jx.op_params(eqn) == {"scale": 0.5}
    assert is_recomputable(eqn, SHIPPED)
    again = only(jx.normalize(jaxpr))
    assert not set(jx.regions(again)[0].body.invars) & set(region.body.invars)


def test_the_body_can_be_replaced() -> None:
    jaxpr = jx.normalize(jax.make_jaxpr(halves)(real(4, 6)))
    eqn = only(jaxpr)
    thirds = only(jx.normalize(jax.make_jaxpr(lambda x: halves(x, 1 / 3))(real(4, 6))))
    changed = jx.with_eqns(jaxpr, [jx.with_bodies(eqn, [jx.regions(thirds)[0].body])])
    x = real(4, 6)
    y, sums = jx.as_fun(changed)(x)
    np.testing.assert_allclose(y, x / 3, rtol=1e-6)
    np.testing.assert_allclose(sums, (x / 3).sum(1), rtol=1e-5)
    np.testing.assert_allclose(jx.as_fun(jaxpr)(x)[0], x / 2)
    assert eqn.params != changed.eqns[0].params


def test_dead_code_elimination_drops_the_whole_equation_or_nothing() -> None:
    jaxpr = jx.normalize(jax.make_jaxpr(lambda x: (x + 1, *halves(x), halves(x, 3.0)[1]))(real(4, 6)))
    none = jx.eliminate_dead_code(jx.with_eqns(jaxpr, jaxpr.eqns, outvars=jaxpr.outvars[:1]))
    assert [e.primitive.name for e in none.eqns] == ["add"]
    one = jx.eliminate_dead_code(jx.with_eqns(jaxpr, jaxpr.eqns, outvars=jaxpr.outvars[3:]))
    assert len(jx.regions(only(one))[0].body.outvars) == 2


def test_its_autodiff_rules_hold_inside_the_step_and_around_it() -> None:
    x = real(8, 6)

    def loss(x: Any) -> Any:
        y, sums = halves(jnp.sin(x))
        return (y * jnp.cos(y)).sum() + (sums**2).sum()

    def step(fun: Callable[..., Any], spec: P = ROWS) -> Any:
        return autoshard.jit(fun, mesh=EIGHT, strategy="replicated", in_shardings=spec)

    expected = jax.jvp(loss, (x,), (x,))
    for got in (step(lambda x: jax.jvp(loss, (x,), (x,)))(x), jax.jvp(step(loss), (x,), (x,))):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    many = np.stack([x, -x])
    for got in (step(jax.vmap(halves), P(None, "x"))(many), jax.vmap(step(halves))(many)):
        chex.assert_trees_all_close(got, jax.vmap(halves)(many), rtol=1e-5, strict=True)


QUERIES, SORTED, HEIGHTS = real(64, 48), np.sort(real(101)), real(102)[:101]
SMALL = np.asarray(np.random.default_rng(0).integers(-9, 9, (64, 48)), "int32")
Case = tuple[Callable[..., Any], tuple[Any, ...], int]
"""Function, operands (those with 64 rows are split by rows), and the bytes that a device may send."""
SILENT: dict[str, Case] = {
    **{f"searchsorted, {m}": (lambda a, q, m=m: jnp.searchsorted(a, q, method=m), (SORTED, QUERIES), 0)
       for m in ("scan", "scan_unrolled", "compare_all")},
    "searchsorted, right": (lambda a, q: jnp.searchsorted(a, q, side="right"), (SORTED, QUERIES), 0),
    "searchsorted, rows": (jax.vmap(jnp.searchsorted), (np.sort(real(64, 101), 1), QUERIES), 0),
    "digitize": (jnp.digitize, (QUERIES, SORTED), 0),
    "interp": (jnp.interp, (QUERIES, SORTED, HEIGHTS), 0),
    "interp, jvp": (lambda *a: jax.jvp(jnp.interp, a, a), (QUERIES, SORTED, HEIGHTS), 0),
    "interp, gradient by the queries": (jax.grad(lambda *a: jnp.sin(jnp.interp(*a)).sum()),
                                        (QUERIES, SORTED, HEIGHTS), 0),
    "nonzero, rows": (jax.vmap(lambda x: jnp.nonzero(x > 0, size=40, fill_value=-1)), (QUERIES,), 0),
    "unique, rows": (jax.vmap(lambda x: jnp.unique(x, size=20, fill_value=-99)), (SMALL,), 0),
    "insert": (lambda x: jnp.insert(x, jnp.array([1, 3]), 2.0, axis=1), (QUERIES,), 0),
    "expm": (jax.scipy.linalg.expm, (real(64, 3, 3),), 0),
    "frexp": (jnp.frexp, (QUERIES,), 0),
    "ldexp": (jnp.ldexp, (QUERIES, SMALL), 0),
    "ldexp, gradient": (jax.grad(lambda x, n: jnp.sin(jnp.ldexp(x, n)).sum()), (QUERIES, SMALL), 0),
}  # fmt: skip
SENDING: dict[str, Case] = {
    # the bins are counted in parts: 11 counts, and the smallest and largest element, there and back
    "histogram": (lambda x: jnp.histogram(x, bins=11), (QUERIES,), 2 * 4 * (11 + 2)),
    # each part's count, and where its elements fall among the 50
    "nonzero": (lambda x: jnp.nonzero(x > 1, size=50), (QUERIES,), 4 * 8 + 2 * 4 * 51),
    # what is ordered as a whole is gathered once, and once more from its places
    "unique": (lambda x: jnp.unique(x, size=20, fill_value=-99), (SMALL,), 3 * SMALL.nbytes),
    "searchsorted, sort": (lambda a, q: jnp.searchsorted(a, q, method="sort"), (SORTED, QUERIES), 3 * QUERIES.nbytes),
    # the heights are read in four places: below, above, and past either end
    "interp, gradient by the heights": (jax.grad(lambda *a: jnp.sin(jnp.interp(*a)).sum(), 2),
                                        (QUERIES, SORTED, HEIGHTS), 4 * 2 * HEIGHTS.nbytes),
}  # fmt: skip


@pytest.mark.parametrize(("fun", "args", "most"), (SILENT | SENDING).values(), ids=SILENT | SENDING)
def test_split_by_rows_results_are_equal_and_bytes_sent_are_bounded(fun: Any, args: Any, most: int) -> None:
    specs = tuple(ROWS if len(a) == 64 else P() for a in args)
    step = autoshard.jit(fun, mesh=EIGHT, strategy="replicated", in_shardings=specs)
    plan, compiled = step.plan(*args), step.lower(*args).compile()
    sent = collectives(compiled.as_text(), plan.mesh)
    assert sum(c.wire_bytes(plan.mesh) for c in sent) <= most, sent
    assert all(row.unexplained <= 0 for row in audit(compiled, plan).rows)
    assert not step.executable(*args).graph.diagnostics
    got, expected = (jax.tree.leaves(f(*args)) for f in (step, jax.jit(fun)))
    for a, b in zip(got, expected, strict=True):
        exact = np.testing.assert_array_equal
        exact(a, b) if a.dtype.kind == "i" else np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", [Halves, "Halves", "call_hi_primitive:Halves"])
def test_a_rule_by_name(op: Any) -> None:
    seen: list[dict[str, Any]] = []

    def rule(x: Any, **params: Any) -> Any:
        seen.append(params)
        return autoshard.Rule((((), ("b",)),), (((), ("b",)), ((),)), (("b", "whole"),))

    x = real(64, 16)
    step = autoshard.jit(halves, mesh=EIGHT, strategy="replicated", in_shardings=ROWS, rules={op: rule})
    assert step.plan(x).out_specs == (P(), P())
    assert seen == [{"scale": 0.5}]
    np.testing.assert_allclose(step(x)[1], (x / 2).sum(1), rtol=1e-5)
    plain = autoshard.jit(halves, mesh=EIGHT, strategy="replicated", in_shardings=ROWS)
    assert plain.plan(x).out_specs == (ROWS, ROWS)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(RuleError, match="call_hi_primitive takes no rule .* such as SearchSorted.* by its name"):
        autoshard.register_rule("call_hi_primitive", "ab -> ab")
    with pytest.raises(RuleError, match="rules= names 'halves'.* did you mean 'Halves'"):
        autoshard.jit(halves, mesh=EIGHT, rules={"halves": "ab -> ab, a"}).plan(real(64, 16))


@dataclass(frozen=True)
class Coarse:
    """Integers and the step size that they count."""

    steps: Any
    size: Any


@dataclass(frozen=True)
class CoarseType(HiType):
    shape: tuple[int, ...]

    def lo_ty(self) -> list[Any]:
        return [ShapedArray(self.shape, jnp.dtype("int8")), ShapedArray((), jnp.dtype("float32"))]

    def lower_val(self, value: Coarse) -> list[Any]:
        return [value.steps, value.size]

    def raise_val(self, *parts: Any) -> Coarse:
        return Coarse(*parts)

    def str_short(self, *_: Any, **__: Any) -> str:
        return "Coarse" + str(list(self.shape))


register_hitype(Coarse, lambda value: CoarseType(value.steps.shape))


class Between(HiPrim):
    """Converts an array to a `Coarse`, and back."""

    def __init__(self, of: Any) -> None:
        other = ShapedArray(of.shape, jnp.dtype("float32")) if isinstance(of, CoarseType) else CoarseType(of.shape)
        self.in_avals, self.out_aval, self.params = (of,), other, {}
        super().__init__()

    def expand(self, x: Any) -> Any:
        return x.steps * x.size if isinstance(x, Coarse) else Coarse((x * 8).astype("int8"), jnp.float32(0.125))


def test_operations_on_other_types_than_arrays_are_kept_whole_with_a_diagnostic() -> None:
    def fun(x: Any) -> Any:
        coarse = Between(jax.typeof(x))(jnp.sin(x))
        return Between(jax.typeof(coarse))(coarse) + 1

    x = real(64, 16)
    step = autoshard.jit(fun, mesh=EIGHT, strategy="replicated", in_shardings=ROWS)
    reason = "Between takes or returns Coarse[64, 16], which is not an array, so its body is not read"
    assert step.plan(x).explain().replace("\n    ", " ").count(reason) == 2
    np.testing.assert_array_equal(step(x), jax.jit(fun)(x))
    with pytest.raises(RuleError, match="Between takes or returns"):
        autoshard.jit(fun, mesh=EIGHT, strict=True).plan(x)


def test_a_graph_has_no_hi_primitive_on_arrays() -> None:
    def fun(x: Any) -> Any:
        root = jax.lax.custom_root(
            lambda y: y**2 - x, x, lambda f, y: jax.lax.fori_loop(0, 9, lambda _, y: (y + x / y) / 2, y), lambda g, y: y
        )
        return halves(root), jnp.interp(x, SORTED, HEIGHTS), jnp.nonzero(x, size=5), jnp.frexp(x)

    ops = {n.kind.op for n in graph(fun, [(64, 16)], mesh(x=8)).nodes if not n.tie}
    assert "call_hi_primitive" not in ops
    assert {"mul", "reduce_sum", "div"} <= ops
