"""Every dtype that JAX has: cast from and to each other, moved, reduced and trained in, sharded as on one device.

XLA for CPU (JAX 0.12) cannot run those of `REFUSED`, sharded or not.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import SpecError
from tests.combinations import ALL

MESH = {"data": 4, "model": 2}
FLOATS = (
    "float4_e2m1fn",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "bfloat16",
    "float16",
    "float32",
    "float64",
)
SCALES = ("float8_e8m0fnu",)
"""Powers of two, without zero and negative numbers."""
INTEGERS = ("int2", "uint2", "int4", "uint4", *(f"{u}int{b}" for b in (8, 16, 32, 64) for u in ("", "u")))
COMPLEX = ("complex64", "complex128")
DTYPES = (*FLOATS, *SCALES, *INTEGERS, *COMPLEX, "bool")
REFUSED = ("float6_e2m3fn", "float6_e3m2fn", "int1", "uint1")


@pytest.fixture(autouse=True)
def _double_precision() -> Any:
    with jax.enable_x64(True):
        yield


def numbers(dtype: str, shape: tuple[int, ...] = (8, 16)) -> np.ndarray[Any, Any]:
    """Small numbers, some negative, some fractions, as far as ``dtype`` has them."""
    values = np.random.default_rng(0).integers(-3, 4, shape).astype(np.float32) / 2
    return (np.exp2(np.floor(values)) if dtype in SCALES else values).astype(jnp.dtype(dtype))


def bits(x: Any) -> np.ndarray[Any, Any]:
    """The bytes of an array, where equal numbers are to be equal to the sign of zero; any NaN for any other."""
    array = np.asarray(x)
    wide = array.astype(np.complex128).reshape(-1)
    return np.where(np.isnan(wide), np.nan, wide).view(np.float64).view(np.uint64)


def assert_same(step: Any, *args: Any, **options: Any) -> None:
    """Bit for bit what one device computes."""
    got, expected = autoshard.jit(step, mesh=MESH, **options)(*args), jax.jit(step)(*args)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(bits(a), bits(b)), (jax.tree_util.keystr(path), a, b)


def test_the_list_is_whole() -> None:
    scalars = (getattr(jnp, name) for name in dir(jnp))
    known = {np.dtype(s.dtype).name for s in scalars if isinstance(getattr(s, "dtype", None), np.dtype)}
    assert known <= {*DTYPES, *REFUSED}
    assert set(DTYPES) <= known


TWO_BITS = ("int2", "uint2")
"""Kept whole: XLA for CPU cannot move them."""


PINS = {name: P() if name in TWO_BITS else P("data", "model") for name in DTYPES}
HUBS = DTYPES if ALL else ("float8_e4m3fn", "int4")
"""Dtypes that every other is cast to and from where casts are run, which takes much longer than to plan them."""


def casts(xs: dict[str, Any], hubs: Any = DTYPES) -> Any:
    pairs = ((old, new) for old, new in itertools.product(DTYPES, DTYPES) if old in hubs or new in hubs)
    complex_to_real = itertools.product(COMPLEX, set(DTYPES) - set(COMPLEX))
    return {(old, new): xs[old].astype(new) for old, new in set(pairs) - set(complex_to_real)}


def test_casts_of_every_dtype_to_every_other_are_planned() -> None:
    plan = autoshard.jit(casts, mesh=MESH, in_shardings=(PINS,)).plan({name: numbers(name) for name in DTYPES})
    for place in plan.outputs:
        old, new = re.findall(r"'(\w+)'", place.path)
        assert place.dtype == new
        assert place.spec.axes == (() if {old, new} & set(TWO_BITS) else ("data", "model"))


def test_casts_are_as_on_one_device() -> None:
    assert_same(lambda xs: casts(xs, HUBS), {name: numbers(name) for name in DTYPES}, in_shardings=(PINS,))


def moves(x: Any) -> dict[str, Any]:
    """What takes elements elsewhere and computes nothing, along a dimension that is split, too."""
    last = x.shape[0] - 3
    return {
        "transpose": x.T,
        "reshape": x.reshape(-1),
        "roll": jnp.roll(x, 3, 0),
        "flip": x[::-1],
        "concatenate": lax.concatenate([x, x[:4]], 0),
        "pad": lax.pad(x, x[0, 0], [(2, 2, 0), (0, 0, 1)]),
        "slice": lax.slice(x, (1, 0), (5, 16), (2, 1)),
        "dynamic slice": lax.dynamic_slice(x, (jnp.argmax(x[:, 0] == x[1, 0]), 0), (3, 16)),
        "dynamic update": lax.dynamic_update_slice(x, x[:2], (last, 0)),
        "gather": x[jnp.array([3, 1, 7, 0])],
        "scatter": x.at[jnp.array([1, 2])].set(x[:2]),
        "sort": lax.sort(x, dimension=0),
        "argmax": lax.argmax(x, 0, np.dtype("int4")),
        "max": jnp.max(x, 0),
        "min": jnp.min(x),
        "running max": lax.cummax(x, axis=0),
        "scan": lax.scan(lambda c, row: (row, c), x[0], x),
    }


def sums(x: Any) -> dict[str, Any]:
    """What rounds to few digits: in one place, for the sum of rounded sums is another number.

    XLA for CPU (JAX 0.12) cannot upcast sharded operands of four bits beside other results.
    """
    contract_rows = (((0,), (0,)), ((), ()))
    wider = {} if "4" in x.dtype.name[:6] else {"dot to float32": jnp.float32, "dot to int32": jnp.int32}
    return {
        "sum": lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None),
        "product": lax.reduce_prod_p.bind(x, axes=(0,), out_sharding=None),
        "running sum": lax.cumsum(x, axis=0),
        "scatter-add": x.at[jnp.array([1, 1])].add(x[:2]),
        "dot": lax.dot_general(x, x, contract_rows),
        **{k: lax.dot_general(x, x, contract_rows, preferred_element_type=d) for k, d in wider.items()},
        "convolution": lax.conv_general_dilated(x[None, None], x[None, None, :3, :3], (1, 1), "SAME"),
        "window": lax.reduce_window(x, jnp.zeros((), x.dtype), lax.add, (3, 1), (1, 1), "SAME"),
        "picked": lax.reduce_sum_p.bind(
            jax.nn.one_hot(jnp.arange(8), 16, dtype=x.dtype) * x, axes=(1,), out_sharding=None
        ),
        "positions": lax.iota(x.dtype, 64) + x[0, 0],
    }


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e8m0fnu", "int4"])
def test_few_bits_are_moved_as_on_one_device(dtype: str) -> None:
    assert_same(moves, numbers(dtype), in_shardings=P("data", "model"))


@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "float8_e4m3fn", "int4"])
def test_few_bits_are_summed_as_on_one_device(dtype: str) -> None:
    assert_same(sums, numbers(dtype), in_shardings=P("data", "model"))


def test_positions_are_counted_where_floats_represent_them() -> None:
    def step(x: Any) -> Any:
        return [lax.iota(dtype, 8 * 303) for dtype in ("float8_e4m3fn", "bfloat16", "float32", "int4")]

    assert_same(step, numbers("float32"), out_shardings=P(("data", "model")))


def test_a_pin_that_splits_two_bits_is_refused() -> None:
    step = autoshard.jit(lambda w: w.astype("float32") * 2, mesh=MESH, in_shardings=P("data"))
    with pytest.raises(SpecError, match=r"w, of dtype int2, is pinned to .* fewer than 4 bits"):
        step(numbers("int2"))
    step = autoshard.jit(lambda w: w.astype("int2"), mesh=MESH, out_shardings=P("data"))
    with pytest.raises(SpecError, match=r"result, of dtype int2, is pinned to .* fewer than 4 bits"):
        step(numbers("int8"))


@pytest.mark.parametrize("strategy", ["auto", "fsdp", "tp"])
def test_weights_of_two_bits_are_whole(strategy: str) -> None:
    def step(w: Any, scale: Any, x: Any) -> Any:
        return x @ (w.astype("float32") * scale)

    args = numbers("int2", (16, 32)), numbers("float32", (32,)), numbers("float32", (64, 16))
    assert autoshard.jit(step, mesh=MESH, strategy=strategy).plan(*args).inputs[0].spec.axes == ()
    assert_same(step, *args, strategy=strategy)


@jax.custom_vjp
def fp8_product(x: Any, w: Any, scales: Any) -> Any:
    """[batch, in] @ [in, out] in 8-bit floats, summed in float32. The scales' gradients are the maxima to scale by
    in later steps."""
    return _forward(x, w, scales)[0]


def _forward(x: Any, w: Any, scales: Any) -> Any:
    narrow = [jnp.clip(a * scales[k], -448, 448).astype("float8_e4m3fn") for a, k in ((x, "x"), (w, "w"))]
    y = jnp.dot(*narrow, preferred_element_type=jnp.float32) / (scales["x"] * scales["w"])
    return y, (*narrow, scales, {"x": jnp.max(jnp.abs(x)), "w": jnp.max(jnp.abs(w))})


def _backward(residuals: Any, g: Any) -> Any:
    x, w, scales, largest = residuals
    narrow = jnp.clip(g * scales["g"], -57344, 57344).astype("float8_e5m2")
    dx = jnp.dot(narrow, w.T, preferred_element_type=jnp.float32) / (scales["g"] * scales["w"])
    dw = jnp.dot(x.T, narrow, preferred_element_type=jnp.float32) / (scales["g"] * scales["x"])
    return dx, dw, {**largest, "g": jnp.max(jnp.abs(g))}


fp8_product.defvjp(_forward, _backward)


def fp8_step(state: Any, x: Any, target: Any) -> Any:
    """SGD with delayed scaling: by powers of two, from the largest of the last four maxima."""

    def scale(history: Any) -> Any:
        return jnp.exp2(jnp.floor(jnp.log2(64 / jnp.max(history))))

    def loss(w: Any, scales: Any) -> Any:
        h = jax.nn.relu(fp8_product(x, w["in"], scales["in"]))
        return jnp.sum((fp8_product(h, w["out"], scales["out"]) - target) ** 2) / 64

    scales = jax.tree.map(scale, state["history"])
    value, (grads, largest) = jax.value_and_grad(loss, (0, 1))(state["w"], scales)
    return {
        "w": jax.tree.map(lambda p, g: p - g / 64, state["w"], grads),
        "history": jax.tree.map(lambda h, new: jnp.roll(h, 1).at[0].set(new), state["history"], largest),
    }, value


def int4_step(state: Any, x: Any, target: Any) -> Any:
    """Frozen 4-bit weights with a scale for every 8 rows, and an adapter that is trained."""

    def loss(adapter: Any) -> Any:
        blocks = state["w"].reshape(-1, 8, state["w"].shape[1]).astype("bfloat16") * state["scale"][:, None]
        y = x @ blocks.reshape(state["w"].shape).astype("float32") + (x @ adapter["a"]) @ adapter["b"]
        return jnp.sum((y - target) ** 2) / 64

    value, grads = jax.value_and_grad(loss)(state["adapter"])
    return {**state, "adapter": jax.tree.map(lambda p, g: p - g / 1024, state["adapter"], grads)}, value


def float32(*shape: int) -> np.ndarray[Any, Any]:
    return numbers("float32", shape)


HISTORY = {layer: {k: np.ones(4, np.float32) for k in "xwg"} for layer in ("in", "out")}
STEPS = {
    "fp8, delayed scaling": (
        fp8_step,
        {"w": {"in": float32(16, 32), "out": float32(32, 8)}, "history": HISTORY},
        0.0,  # the operands of every sum have so few digits that no order of additions rounds
    ),
    "int4 weights": (
        int4_step,
        {
            "w": numbers("int4", (16, 8)),
            "scale": numbers("bfloat16", (2, 8)),
            "adapter": {"a": float32(16, 4), "b": float32(4, 8)},
        },
        1e-5,
    ),
}


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
@pytest.mark.parametrize(("step", "state", "rtol"), STEPS.values(), ids=STEPS)
def test_training_in_few_bits_is_as_on_one_device(step: Any, state: Any, rtol: float, strategy: str) -> None:
    sharded, expected = state, state
    x, target = float32(64, 16), float32(64, 8)
    train, reference = autoshard.jit(step, mesh=MESH, strategy=strategy), jax.jit(step)
    for _ in range(4):
        (sharded, value), (expected, want) = train(sharded, x, target), reference(expected, x, target)
        assert np.allclose(value, want, rtol=1e-6)
    for (path, a), b in zip(jax.tree.leaves_with_path(sharded), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol, rtol, err_msg=jax.tree_util.keystr(path)
        )
