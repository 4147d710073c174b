"""Rules of gather, scatter and dynamic slices."""

from __future__ import annotations

import jax
import pytest
from jax import lax
from jax import numpy as jnp

SET = ("int32", 8, 16)
CASES = {
    "embedding": ("gather", lambda x, i: x[i], [(64, 32), SET], "ab, cd. -> cdb {a: sum}"),
    "embedding of booleans": ("gather", lambda x, i: x[i], [("bool", 64, 32), SET], "ab, cd. -> cdb {a: or}"),
    "embedding of powers of two": (
        "gather",
        lambda x, i: x[i],
        [("float8_e8m0fnu", 64, 32), SET],
        "ab, cd. -> cdb {a: whole}",
    ),
    "embedding of 8-bit floats": (
        "gather",
        lambda x, i: x[i],
        [("float8_e5m2", 64, 32), SET],
        "ab, cd. -> cdb {a: sum}",
    ),
    "take_along_axis": ("gather", lambda x, i: jnp.take_along_axis(x, i, 1), [(8, 64), SET], "ab, ac. -> ac {b: sum}"),
    "two coordinates": (
        "gather",
        lambda x, i, j: x[i, j],
        [(8, 64), ("int32", 5), ("int32", 5)],
        "ab, c. -> c {a: sum, b: sum}",
    ),
    "windows": (
        "gather",
        lambda x, i: jax.vmap(lambda k: lax.dynamic_slice(x, (k, 0), (2, 32)))(i),
        [(64, 32), ("int32", 5)],
        ".a, b. -> b.a",
    ),
    "embedding's gradient": (
        "scatter-add",
        jax.grad(lambda x, i: (x[i] ** 2).sum()),
        [(64, 32), SET],
        "ab, cd., cdb -> ab {c: sum, d: sum}",
    ),
    "windows' gradient": (
        "scatter-add",
        jax.grad(lambda x, i: (jax.vmap(lambda k: lax.dynamic_slice(x, (k, 0), (2, 32)))(i) ** 2).sum()),
        [(64, 32), ("int32", 5)],
        ".a, b., b.a -> .a {b: sum}",
    ),
    "at add": (
        "scatter-add",
        lambda x, i, u: x.at[i].add(u),
        [(64, 32), ("int32", 8), (8, 32)],
        "ab, c., cb -> ab {c: sum}",
    ),
    "at max": ("scatter-max", lambda x, i, u: x.at[i].max(u), [(64,), ("int32", 8), (8,)], "a, b., b -> a {b: max}"),
    "at multiply": (
        "scatter-mul",
        lambda x, i, u: x.at[i].multiply(u),
        [(64,), ("int32", 8), (8,)],
        "a, b., b -> a {b: prod}",
    ),
    "at set": (
        "scatter",
        lambda x, i, u: x.at[i].set(u),
        [(64, 32), ("int32", 8), (8, 32)],
        "ab, c., cb -> ab {c: whole}",
    ),
    "batched scatter": (
        "scatter-add",
        jax.vmap(lambda x, i, u: x.at[i].add(u)),
        [(8, 64), ("int32", 8, 3), (8, 3)],
        "ab, ac., ac -> ab {c: sum}",
    ),
    "dynamic_slice in the host's memory": (
        "dynamic_slice",
        lambda x, i: lax.dynamic_slice_in_dim(jax.device_put(x, jax.memory.Space.Host), i, 2),
        [(8, 64), ("int32",)],
        "ab, ,  -> .b {a: whole}",
    ),
    "dynamic_slice": (
        "dynamic_slice",
        lambda x, i: lax.dynamic_slice_in_dim(x, i, 2),
        [(64, 32), ("int32",)],
        "ab, ,  -> .b {a: local}",
    ),
    "slice of two dimensions": (
        "dynamic_slice",
        lambda x, i: lax.dynamic_slice(x, (i, i), (2, 2)),
        [(64, 32), ("int32",)],
        ".., ,  -> ..",
    ),
    "a row in the host's memory": (
        "dynamic_update_slice",
        lambda x, u, i: lax.dynamic_update_slice_in_dim(*jax.device_put((x, u), jax.memory.Space.Host), i, 0),
        [(8, 64), (1, 64), ("int32",)],
        "ab, .b, ,  -> ab {a: whole}",
    ),
    "one cache entry": (
        "dynamic_update_slice",
        lambda x, u, i: lax.dynamic_update_slice_in_dim(x, u, i, 1),
        [(4, 64, 32), (4, 1, 32), ("int32",)],
        "abc, a.c, , ,  -> abc {b: local}",
    ),
    "several cache entries": (
        "dynamic_update_slice",
        lambda x, u, i: lax.dynamic_update_slice_in_dim(x, u, i, 1),
        [(4, 64, 32), (4, 2, 32), ("int32",)],
        "abc, a.c, , ,  -> abc {b: local}",
    ),
}


@pytest.mark.parametrize(("name", "fn", "args", "expected"), CASES.values(), ids=CASES)
def test_rule(rule_of, name, fn, args, expected):
    assert rule_of(name, fn, *args) == expected


@pytest.mark.parametrize(
    ("dtype", "mode", "passes"),
    [("float32", "clip", True), ("float32", "fill", True), ("int32", "clip", True), ("int32", "fill", False)],
)
def test_a_gathered_sum_passes_unless_what_fills_the_rest_would_be_added_to_itself(rule_of, dtype, mode, passes):
    passthrough = rule_of("gather", lambda x, i: x.at[i].get(mode=mode), (dtype, 64, 32), SET, passthrough=True)
    assert ("sum: 0" in passthrough) == passes
