"""Rules of users, for primitives, kernels, foreign functions, functions with custom derivatives or partitioning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import PlanError, RuleError
from autoshard.ir.rule import parse
from autoshard.ir.rule_registry import table_key
from autoshard.jaxpr import find_primitive

MESH = {"a": 2, "b": 4}
GATHERS = re.compile(r"\b(all-gather|all-to-all|collective-permute)\(")
RNG = np.random.default_rng(0)


def real(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


@pytest.fixture
def register() -> Iterator[Any]:
    """`autoshard.register_rule`, undone after the test."""
    given: list[Any] = []

    def give(op: Any, *args: Any, **kwargs: Any) -> None:
        autoshard.register_rule(op, *args, **kwargs)
        given.append(op)

    yield give
    for op in dict.fromkeys(map(table_key, given)):
        autoshard.unregister_rule(op)


def matmul_kernel(x_ref: Any, w_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] @ w_ref[...]


def kernel(x: Any, w: Any, name: str | None = None) -> Any:
    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return pl.pallas_call(matmul_kernel, out_shape=out, interpret=True, name=name)(x, w)


odd_p = Primitive("odd_product")
odd_p.def_impl(lambda x, w: x @ w)
odd_p.def_abstract_eval(lambda x, w: jax.core.ShapedArray((x.shape[0], w.shape[1]), x.dtype))
mlir.register_lowering(odd_p, mlir.lower_fun(lambda x, w: x @ w, multiple_results=False))


@jax.custom_vjp
def scaled(x: Any, w: Any) -> Any:
    return jnp.tanh(x) * w


scaled.defvjp(lambda x, w: (scaled(x, w), (x, w)), lambda saved, g: (g * saved[1], g * saved[0]))


def planned(fun: Any, *args: Any, **options: Any) -> tuple[Any, str, list[str]]:
    """The plan, the compiled text, and the diagnostics; the results are those of plain JAX."""
    step = autoshard.jit(fun, mesh=MESH, **options)
    plan = step.plan(*args)
    np.testing.assert_allclose(step(*args), jax.jit(fun)(*args), rtol=2e-5, atol=1e-6)
    return plan, step.lower(*args).compile().as_text(), [d.text for d in plan.diagnostics]


def axes(plan: Any) -> list[tuple[tuple[str, ...], ...]]:
    return [p.spec.dims for p in (*plan.inputs, *plan.outputs)]


def test_a_rule_by_primitive_and_by_name(register: Any) -> None:
    x, w = real(8, 16), real(16, 8)
    options = {"in_shardings": (P("a", "b"), P("b")), "out_shardings": P("a")}
    step = autoshard.jit(odd_p.bind, mesh=MESH, **options)
    before = step.plan(x, w)
    assert [d.text.split("whole: ")[1] for d in before.diagnostics] == ["no rule for the primitive 'odd_product'"]
    for op in (odd_p, "odd_product"):
        register(op, "mk, kn -> mn {k: sum}", example=(x, w))
        plan, text, said = planned(odd_p.bind, x, w, **options)
        assert said == []
        assert {c.kind for c in plan.cost.collectives} == {"all-reduce"}
        assert not GATHERS.search(text)
    assert step.plan(x, w) is before  # what is planned keeps its plan
    assert step.plan(real(16, 16), w).diagnostics == ()  # other shapes are planned by the rules of now


@pytest.mark.parametrize(
    "op", ["matmul_kernel", "pallas_call:matmul_kernel", matmul_kernel], ids=["name", "full name", "function"]
)
def test_a_kernel_runs_on_shards(register: Any, op: Any) -> None:
    register(op, "mk, kn -> mn {k: sum}", local=lambda _, x, w: kernel(x, w))
    x, w = real(8, 16), real(16, 8)
    plan, text, said = planned(kernel, x, w, in_shardings=(P("a", None), P(None, "b")))
    assert axes(plan) == [(("a",), ()), ((), ("b",)), (("a",), ("b",))]
    assert said == []
    assert plan.cost.collectives == ()
    assert not re.search(r"all-|collective-", text)


def test_partial_results_of_a_kernel_are_reduced(register: Any) -> None:
    register("matmul_kernel", "mk, kn -> mn {k: sum}", local=lambda _, x, w: kernel(x, w))
    x, w = real(8, 16), real(16, 8)
    plan, text, _ = planned(kernel, x, w, in_shardings=(P("a", "b"), P("b")), out_shardings=P("a"))
    assert [c.kind for c in plan.cost.collectives] == ["all-reduce"]
    assert "all-reduce" in text
    assert not GATHERS.search(text)


def test_a_saved_plan_runs_the_kernel_on_shards(register: Any, tmp_path: Any) -> None:
    register("matmul_kernel", "mk, kn -> mn {k: sum}", local=lambda _, x, w: kernel(x, w))
    x, w = real(8, 16), real(16, 8)
    autoshard.jit(kernel, mesh=MESH, in_shardings=(P("a", "b"), P("b"))).plan(x, w).save(tmp_path / "plan.json")
    plan = autoshard.Plan.load(tmp_path / "plan.json")
    np.testing.assert_allclose(autoshard.jit(kernel, strategy=plan)(x, w), x @ w, rtol=1e-4, atol=1e-5)
    register("matmul_kernel", "mk, kn -> mn {k: whole}", local=lambda _, x, w: kernel(x, w))
    with pytest.raises(PlanError, match="plan again"):  # it was made under another rule
        autoshard.jit(kernel, strategy=plan)(x, w)


@pytest.mark.parametrize("kind", ["sum", "max", "min", "prod", "and", "or"])
def test_every_reduction_kind_of_a_kernel(register: Any, kind: str) -> None:
    reduce = {"and": jnp.all, "or": jnp.any}.get(kind) or getattr(jnp, kind)

    def reduce_kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = reduce(x_ref[...], 1)

    def call(x: Any) -> Any:
        return pl.pallas_call(reduce_kernel, out_shape=jax.ShapeDtypeStruct(x.shape[:1], x.dtype), interpret=True)(x)

    register(reduce_kernel, f"ab -> a {{b: {kind}}}", local=lambda _, x: call(x))
    x = {"and": real(8, 16) > -1.5, "or": real(8, 16) > 1.5}.get(kind, real(8, 16))
    step = autoshard.jit(call, mesh=MESH, in_shardings=P("a", "b"), out_shardings=P("a"), strategy="replicated")
    assert step.plan(x).islands[0].out_specs[0].partial == (("b", kind),)
    assert "all-" in step.lower(x).compile().as_text()
    np.testing.assert_allclose(step(x), reduce(x, 1), rtol=1e-5)


def test_a_named_kernel_in_a_loop(register: Any) -> None:
    register("pallas_call:mine", "mk, kn -> mn {k: sum}", local=lambda _, x, w: kernel(x, w))

    def fun(x: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda h, w: (jnp.tanh(kernel(h, w, "mine")), None), x, ws)[0]

    plan, text, said = planned(fun, real(8, 16), real(3, 16, 16), in_shardings=(P("a"), P()))
    assert len(plan.islands) == 1
    assert said == []
    assert not re.search(r"all-|collective-", text)


def test_a_local_factor_with_its_collectives(register: Any) -> None:
    """A running sum along a dimension that is split."""

    def running_kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = jnp.cumsum(x_ref[...], 0)

    def call(x: Any) -> Any:
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(running_kernel, out_shape=out, interpret=True)(x)

    def part(axes: tuple[str, ...], x: Any) -> Any:
        ends = jax.lax.all_gather(x.sum(0), axes)
        before = jnp.arange(ends.shape[0]) < jax.lax.axis_index(axes)
        return call(x) + jnp.where(before[:, None], ends, 0).sum(0)

    def moves(parts: int, sizes: Any) -> Any:
        return (("all-gather", parts * 64),)

    register(running_kernel, "ab -> ab {a: local}", local=autoshard.Local(part, moves))
    plan, text, _ = planned(call, real(8, 16), in_shardings=(P("b"),), out_shardings=P("b"))
    assert [(c.kind, c.bytes) for c in plan.cost.collectives] == [("all-gather", 256)]
    assert text.count("all-gather(") == 1


def test_a_kernel_without_a_local_form_is_refused(register: Any) -> None:
    register("matmul_kernel", "mk, kn -> mn {k: sum}")
    with pytest.raises(
        RuleError,
        match=r"test_rule_registry.py:\d+: pallas_call: the rule mk, kn -> mn \{k: sum\} for "
        r"'pallas_call:matmul_kernel' splits a kernel.* local=",
    ):
        autoshard.jit(kernel, mesh=MESH).plan(real(8, 16), real(16, 8))


def test_a_kernel_without_a_rule_is_kept_whole_with_a_diagnostic() -> None:
    x, w = real(8, 16), real(16, 8)
    plan, _, said = planned(kernel, x, w, in_shardings=(P("a"), P()))
    text = (
        "pallas_call is kept whole: no rule for 'pallas_call:matmul_kernel'; "
        "autoshard.register_rule('matmul_kernel', ...) gives one"
    )
    assert [d[d.index("pallas_call") :] for d in said] == [text]
    assert text in " ".join(str(plan.explain()).split())
    with pytest.raises(RuleError, match=r"test_rule_registry.py:\d+: pallas_call is kept whole.* drop strict"):
        autoshard.jit(kernel, mesh=MESH, strict=True).plan(x, w)


def for_tpu(step: Any, x: Any) -> str:
    return step.executable(x).nested_jit.trace(x).lower(lowering_platforms=("tpu",)).as_text()


def test_an_accelerator_kernel_runs_in_a_shard_map_with_or_without_a_rule(register: Any) -> None:
    """Plain JAX refuses to lower it for several devices."""

    def double_kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * 2

    def call(x: Any) -> Any:
        return pl.pallas_call(double_kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    x = jax.ShapeDtypeStruct((64, 256), np.float32)
    text = for_tpu(autoshard.jit(call, mesh={"a": 8}, in_shardings=P("a")), x)
    assert re.search(r'manual_axes=\{"a"\} \(%\w+: tensor<64x256xf32>\)', text)
    register(double_kernel, "ab -> ab", local=lambda _, x: call(x))
    text = for_tpu(autoshard.jit(call, mesh={"a": 8}, in_shardings=P("a")), x)
    assert re.search(r'manual_axes=\{"a"\} \(%\w+: tensor<8x256xf32>\)', text)
    assert text.count("@tpu_custom_call") == 1


def test_under_strict_a_rule_is_enough(register: Any) -> None:
    register("matmul_kernel", "mk, kn -> mn {k: sum}", local=lambda _, x, w: kernel(x, w))
    planned(kernel, real(8, 16), real(16, 8), strict=True)


def foreign(x: Any) -> Any:
    """The Cholesky factor, column-major, straight from LAPACK."""
    outs = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:-2], np.int32))
    return jax.ffi.ffi_call("lapack_spotrf_ffi", outs)(x, uplo=np.uint8(ord("L")))[0]


def test_a_foreign_function_runs_on_shards_without_a_local_form(register: Any) -> None:
    a = real(8, 4, 4)
    a = a @ a.swapaxes(1, 2) + 4 * np.eye(4, dtype=np.float32)
    jax.block_until_ready(jnp.linalg.cholesky(a))  # JAX loads LAPACK at first use
    before, _, said = planned(foreign, a, in_shardings=(P("a"),))
    assert "no rule for 'ffi_call:lapack_spotrf_ffi'" in said[0]
    assert before.cost.collectives != ()
    register("lapack_spotrf_ffi", "b.. -> b.., b")
    plan, text, said = planned(foreign, a, in_shardings=(P(("a", "b")),))
    assert axes(plan) == [(("a", "b"), (), ()), (("a", "b"), (), ())]
    assert said == []
    assert not re.search(r"all-|collective-", text)


def test_the_body_of_a_function_with_a_rule_is_not_read(register: Any) -> None:
    def fun(x: Any, w: Any) -> Any:
        return scaled(x, w) + 1

    options = {"in_shardings": (P("a", "b"), P("a", "b")), "strategy": "replicated"}
    x, w = real(8, 16), real(8, 16)
    assert axes(planned(fun, x, w, **options)[0])[-1] == (("a",), ("b",))
    register(scaled, "ab, ab -> ab {b: whole}", example=(x, w))
    step = autoshard.jit(fun, mesh=MESH, **options)
    ops = [n.kind.op for n in step.executable(x, w).graph.nodes]
    assert "tanh" not in ops
    assert ops.count("custom_vjp_call") == 1
    plan, _, _ = planned(fun, x, w, **options)
    assert [c.kind for c in plan.cost.collectives].count("all-gather") >= 2
    grads = jax.grad(lambda x, w: autoshard.jit(fun, mesh=MESH)(x, w).sum())
    np.testing.assert_allclose(grads(x, w), jnp.asarray(w), rtol=1e-6)  # its own derivative is kept


@pytest.mark.parametrize("rules", [[3], "sin", {"sin"}])
def test_rules_must_be_a_mapping(rules: Any) -> None:
    with pytest.raises(RuleError, match=r"rules= takes a mapping from operations to rules, such as .*, not "):
        autoshard.jit(lambda x: x, mesh=MESH, rules=rules)


def test_rules_of_one_step() -> None:
    x, w = real(8, 16), real(8, 16)
    plan = autoshard.jit(scaled, mesh=MESH, rules={"scaled": ".., .. -> .."}).plan(x, w)
    assert axes(plan) == [((), ())] * 3
    autoshard.jit(scaled, mesh=MESH, rules={"custom_vjp_call:scaled": "ab, ab -> ab"}).plan(x, w)
    with pytest.raises(RuleError, match="rules= names 'scaledd'.* did you mean 'scaled'"):
        autoshard.jit(scaled, mesh=MESH, rules={"scaledd": "ab, ab -> ab"}).plan(x, w)
    assert axes(autoshard.jit(scaled, mesh=MESH, in_shardings=P("a")).plan(x, w))[-1] != ((), ())


def partitioned(rule: Any, **options: Any) -> Any:
    @custom_partitioning
    def product(x: Any, w: Any) -> Any:
        return x @ w

    def partition(mesh: Any, args: Any, result: Any) -> Any:
        contracted = args[0].sharding.spec[1] if len(args[0].sharding.spec) > 1 else None

        def part(x: Any, w: Any) -> Any:
            return jax.lax.psum(x @ w, contracted) if contracted else x @ w

        return mesh, part, result.sharding, tuple(a.sharding for a in args)

    product.def_partition(partition, sharding_rule=rule, **options)
    return product


def by_shapes(mesh: Any, operands: Any, results: Any) -> Any:
    assert mesh.shape["b"] == 4
    assert [t.rank for t in operands] == [2, 2]
    return "m k, k n -> m n", {"reduction_factors": ("k",)}


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("m k, k n -> m n", {"reduction_factors": ("k",)}),
        ("rows inner, inner cols -> rows cols", {"reduction_factors": ("inner",)}),
        ("...x, x y -> ...y", {"reduction_factors": ("x",)}),
        (SdyShardingRule((("m", "k"), ("k", "n")), (("m", "n"),), reduction_factors=("k",)), {}),
        (by_shapes, {}),
    ],
    ids=["letters", "words", "dots", "object", "function"],
)
def test_rules_of_custom_partitioning(rule: Any, options: Any) -> None:
    product = partitioned(rule, **options)
    x, w = real(8, 16), real(16, 8)
    step = autoshard.jit(product, mesh=MESH, in_shardings=(P("a", "b"), P("b")), out_shardings=P("a"))
    plan = step.plan(x, w)
    assert plan.diagnostics == ()
    assert [c.kind for c in plan.cost.collectives] == ["all-reduce"]
    (found,) = [n.kind.rule for n in step.executable(x, w).graph.nodes if n.kind.op == "custom_partitioning"]
    letter = {"inner": None, "x": "x"}.get(next(iter(options.get("reduction_factors", "k"))), "k")
    assert [k for _, k in found.kinds] == ["sum"]
    assert letter is None or dict(found.kinds) == {letter: "sum"}
    np.testing.assert_allclose(step(x, w), x @ w, rtol=1e-5, atol=1e-5)


def test_a_registered_rule_precedes_that_of_custom_partitioning(register: Any) -> None:
    product = partitioned("m k, k n -> m n", reduction_factors=("k",))
    register("product", "mk, kn -> mn {k: whole}")
    step = autoshard.jit(product, mesh=MESH)
    graph = step.executable(real(8, 16), real(16, 8)).graph
    assert [str(n.kind.rule) for n in graph.nodes] == ["mk, kn -> mn {k: whole}"]


def test_factors_of_different_sizes_are_a_diagnostic() -> None:
    @custom_partitioning
    def half(x: Any) -> Any:
        return x[:4]

    half.def_partition(
        lambda mesh, args, result: (mesh, half.fun, result.sharding, (args[0].sharding,)), sharding_rule="i j -> i j"
    )
    plan = autoshard.jit(half, mesh=MESH, in_shardings=P(None, "b")).plan(real(8, 16))
    assert "custom_partitioning is kept whole: its rule gives i different sizes" in plan.diagnostics[0].text
    assert axes(plan)[-1] == ((), ("b",))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("mk, kn -> mn {k: sum}", "mk, kn -> mn {k: sum}"),
        (parse("mk, kn -> mn {k: sum}"), "mk, kn -> mn {k: sum}"),
        (lambda x, w: parse("mk, kn -> mn {k: sum}"), "mk, kn -> mn {k: sum}"),
        ("i j, j k -> i k", "ij, jk -> ik"),
        (("i j, j k -> i k", {"reduction_factors": ("j",)}), "ij, jk -> ik {j: sum}"),
        (("row mid, mid col -> row col", {"need_replication_factors": ("mid",)}), "ab, bc -> ac {b: whole}"),
        ("([i, k], [k, j])->([i, j]) {i=8, j=8, k=16} reduction={k}", "ik, kj -> ij {k: sum}"),
        (
            "#sdy.op_sharding_rule<([i, k], [k, j])->([i, j]) {i=8, j=8, k=16} permutation={k}>",
            "ik, kj -> ij {k: halo}",
        ),
        (SdyShardingRule((("i", "k"), ("k", "j")), (("i", "j"),), reduction_factors=("k",)), "ik, kj -> ij {k: sum}"),
    ],
    ids=range(9),
)
def test_every_notation_of_a_rule(rule: Any, expected: str) -> None:
    x, w = real(8, 16), real(16, 8)
    step = autoshard.jit(odd_p.bind, mesh=MESH, rules={odd_p: rule})
    (node,) = step.executable(x, w).graph.nodes
    assert str(node.kind.rule) == expected


@pytest.mark.parametrize(
    ("rule", "example", "message"),
    [
        ("mk, kn mn", None, "needs one '->'"),
        ("mk, kn -> mn {k: sun}", None, "'sun' is no kind of factor; did you mean 'sum'"),
        ("mk, kn -> mn {q: sum}", None, "gives a kind to"),
        (3, None, "3 is no rule"),
        ("([i, k)->([i])", None, "is no sharding rule as Shardy prints them"),
        ("row mid, mid col -> row col {mid: sum}", None, "kinds are given as"),
        (("row mid -> row", {"reduction_factors": ("col",)}), None, r"its options name \['col'\]"),
        (("row mid -> row", {"reduced": ("mid",)}), None, "'reduced' is no group of factors"),
        ("row (mid -> row", None, "a parenthesis in 'row \\(mid' does not close"),
        ("row ...mid -> row", None, "'...' at the beginning"),
        ("mk, kn -> mn {k: local}", None, "local=Local"),
        ("mk, kn -> mn", (real(8, 16),), "is for 2 operands, the example has 1"),
        (
            "mk, kn -> mn",
            (real(8, 16), real(2, 16, 8)),
            r"has rank 2 for operand 1, whose shape is \(2, 16, 8\): write",
        ),
        (
            "mk, kn -> m",
            (real(8, 16), real(16, 8)),
            r"has rank 1 for result 0, whose shape is \(8, 8\): write a factor",
        ),
        ("mk, kn -> mn", (real(8, 16), real(8, 8)), "factor 'k' has the sizes 16 and 8"),
        ("mk, kn -> mn", (real(8, 16), real(16, 8), real(8)), r"has rank 2 for result 0, whose shape is \(8,\)"),
        ("ii j k, j k l -> ii l", (real(8, 16), real(16, 8)), "has 3 dimensions for value 0"),
        (lambda x, w: parse("mk, kn -> mn"), (real(8, 16), real(16)), "has rank 2 for operand 1, whose shape"),
        (
            lambda x, w, *, k: parse("mk, kn -> mn"),
            (real(8, 16), real(16, 8)),
            "needs more than the example's operands.*'k'",
        ),
        ("mk, kn -> mn, m", (real(8, 16), real(16, 8)), r"is for 2 results, there are 1: \(8, 8\)"),
        ("row mid, mid col -> row", (real(8, 16), real(16, 8), real(8, 8)), "has rank 1 for result 0"),
        ("mk, kn -> m", None, r"has rank 1 for result 0, whose shape is \(8, 8\): write a factor"),
        (".k, kn -> .n.", None, "has rank 3 for result 0"),
        ("row mid, mid col -> col", None, "has rank 1 for result 0"),
        ("mk, kn -> mn, mn", None, "is for 2 results, there are 1"),
    ],
    ids=range(25),
)
def test_invalid_rules_are_refused_at_registration(rule: Any, example: Any, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        autoshard.register_rule(odd_p, rule, example=example)
    with pytest.raises(RuleError, match="no rule is registered for 'odd_product'"):
        autoshard.unregister_rule(odd_p)


def test_a_registered_name_that_nearly_matches_is_a_diagnostic() -> None:
    x, fun = real(8, 16), jnp.tanh
    autoshard.register_rule("tanhh", "ab -> ab")
    try:
        said = autoshard.jit(fun, mesh={"x": 8}).plan(x).diagnostics
        assert any("'tanhh', which is not in the step; did you mean 'tanh'?" in d.text for d in said)
        assert not autoshard.jit(jnp.cos, mesh={"x": 8}).plan(x).diagnostics
    finally:
        autoshard.unregister_rule("tanhh")
    assert not autoshard.jit(fun, mesh={"x": 8}).plan(x).diagnostics


def test_a_halo_factor_needs_a_local_form_that_exchanges_it() -> None:
    with pytest.raises(RuleError, match="exchanges no halos for an operation that it cannot partition; make a whole"):
        autoshard.register_rule("some_kernel", "a -> a {a: halo}", local=lambda _, x: x)


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ("scan", "scan takes no rule"),
        ("palas_call:flash", "'palas_call' is no kind of named operation; did you mean 'pallas_call'"),
        ("pallas_call:", "there is no name after the colon"),
        (3, "a rule is for a primitive"),
    ],
)
def test_operations_that_take_no_rule(op: Any, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        autoshard.register_rule(op, "a -> a")


@pytest.mark.parametrize(
    ("op", "rule", "local", "example", "message"),
    [
        ("matmul_kernel", "mk, kn -> m", lambda _, x, w: kernel(x, w), None, r"result 0, whose shape is \(8, 8\)"),
        ("matmul_kernel", "mk, kn -> m", lambda _, x, w: kernel(x, w), (real(4, 2), real(2, 6)), r"shape is \(4, 6\)"),
        (
            "matmul_kernel",
            "mk, kn -> m",
            None,
            (real(4, 2), real(2, 6), real(4, 6)),
            r"result 0, whose shape is \(4, 6\)",
        ),
        (matmul_kernel, "mkb, kn -> mn", None, (real(4, 2), real(2, 6)), r"operand 0, whose shape is \(4, 2\)"),
        (
            "lapack_spotrf_ffi",
            "bij -> bij",
            None,
            (real(8, 4, 4), real(8, 4, 4), real(8)),
            "is for 1 results, there are 2",
        ),
        ("lapack_spotrf_ffi", "b.. -> b.., b.", None, (real(8, 4, 4), real(8, 4, 4), real(8)), "rank 2 for result 1"),
        (scaled, "ab, ab -> a", None, None, "rank 1 for result 0"),
        (scaled, "ab, ab -> a", None, (real(4, 2), real(4, 2)), r"result 0, whose shape is \(4, 2\)"),
        ("tanh", "ab -> a", None, None, "rank 1 for result 0"),
    ],
)
def test_a_wrong_rank_is_refused_at_registration(op, rule, local, example, message) -> None:
    with pytest.raises(RuleError, match=message):
        autoshard.register_rule(op, rule, local=local, example=example)


@pytest.mark.parametrize(
    ("op", "rule"),
    [
        (jax.custom_jvp(lambda x: x.squeeze(-1)), "ab. -> ab"),  # of a whole dimension the size is not known
        (jax.custom_jvp(lambda table, at: table[at]), "vd, n -> nd {v: sum}"),
        (jax.custom_jvp(lambda tree: tree["w"] * 2), "ab -> ab"),
        (jax.custom_jvp(lambda x: x.reshape(-1, 3)), "ab -> cd"),
        (matmul_kernel, "mk, kn -> mn {k: sum}"),
        ("dot_general", "mk, kn -> mn {k: sum}"),
    ],
    ids=range(6),
)
def test_rules_that_cannot_be_checked_at_registration_are_accepted(register: Any, op: Any, rule: str) -> None:
    register(op, rule)


def test_a_wrong_rank_is_refused_when_a_program_uses_the_rule(register: Any) -> None:
    register("matmul_kernel", "mk, kn -> m", local=lambda axes, x, w: kernel(x, w, axes[0]))
    with pytest.raises(RuleError, match=r"test_rule_registry.py:\d+: pallas_call: rule mk, kn -> m has other ranks"):
        autoshard.jit(kernel, mesh=MESH).plan(real(8, 16), real(16, 8))


def test_unregistering_an_unknown_name_is_refused() -> None:
    autoshard.register_rule("flash", "a -> a")
    with pytest.raises(RuleError, match="no rule is registered for 'flush'; did you mean 'flash'"):
        autoshard.unregister_rule("flush")
    autoshard.unregister_rule("flash")


def test_a_name_is_of_the_primitive_that_is_defined_later() -> None:
    autoshard.register_rule("named_before", "a -> a")
    later = Primitive("named_before")
    mlir.register_lowering(later, mlir.lower_fun(lambda x: x, multiple_results=False))
    autoshard.register_rule("named_before", "a -> a")
    autoshard.unregister_rule("named_before")
    with pytest.raises(RuleError, match="no rule is registered for 'named_before'"):
        autoshard.unregister_rule(later)


def test_a_shipped_rule_can_be_replaced(register: Any) -> None:
    register("tanh", ". -> .")
    assert axes(autoshard.jit(jnp.tanh, mesh=MESH).plan(real(16))) == [((),), ((),)]
    register(find_primitive("tanh"), "a -> a")
    assert axes(autoshard.jit(jnp.tanh, mesh=MESH, strategy="replicated", in_shardings=P("a")).plan(real(16))) == [
        (("a",),),
        (("a",),),
    ]
