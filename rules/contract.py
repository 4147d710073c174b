"""Rules of contractions: matrix products and convolutions.

They are linear in each operand, so that one sum-partial operand gives a sum-partial result; two do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jax import lax
from jax import numpy as jnp

from autoshard.ir.halo import Halo, HaloWindow
from autoshard.ir.rule import Aval, Local, LocalWork, Rule, RuleFn
from autoshard.rules.builders import Label, build, is_integer, per_shard, rounded_kinds, table
from autoshard.rules.local_forms.ragged_dot import sharded_ragged_dot
from autoshard.rules.window import contracted_spatial_dim, output_size, sliding_dim

EITHER_OPERAND = "sum: 0 1"
REDUCE_SCATTERED = Local(None, lambda *_: (), used_when="scattered")
"""Where the result's partial sums are reduce-scattered, an island does that: XLA all-reduces them and slices, always
for CPU and often for TPU (JAX 0.12)."""
DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def _dot_labels(lhs: int, rhs: int, numbers: DimensionNumbers) -> tuple[list[str], list[str], list[str]]:
    """Labels of the two operands, of ranks ``lhs`` and ``rhs``, and of their product."""
    (lc, rc), (lb, rb) = numbers
    left, right = [f"l{d}" for d in range(lhs)], [f"r{d}" for d in range(rhs)]
    for i, j in (*zip(lc, rc, strict=True), *zip(lb, rb, strict=True)):
        right[j] = left[i]
    out = [left[d] for d in lb]
    out += [left[d] for d in range(lhs) if d not in (*lb, *lc)]
    return left, right, out + [right[d] for d in range(rhs) if d not in (*rb, *rc)]


def dot_general(
    lhs: Aval, rhs: Aval, *, dimension_numbers: DimensionNumbers, preferred_element_type: Any = None, **_: Any
) -> Rule:
    """Batch and free dimensions are parallel, contracted ones leave partial sums."""
    left, right, out = _dot_labels(len(lhs.shape), len(rhs.shape), dimension_numbers)
    dtype = _result_dtype(lhs, preferred_element_type)
    sums = _partial_kinds({left[d]: "sum" for d in dimension_numbers[0][0]}, lhs, rhs, dtype)
    linear = _bilinear_passthrough(lhs.dtype, rhs.dtype, preferred_element_type)
    local = None if dtype == bool else REDUCE_SCATTERED  # JAX has no collective that sums booleans
    return build([left, right], [out], sums, linear, local=local)


def _result_dtype(lhs: Aval, preferred_element_type: Any) -> Any:
    return lhs.dtype if preferred_element_type is None else jnp.dtype(preferred_element_type)


def _partial_kinds(kinds: dict[str, str], lhs: Aval, rhs: Aval, result: Any) -> dict[str, str]:
    """``kinds`` without sums that `rounded_kinds` excludes, or that are truncated to integers."""
    truncated = is_integer(result) and not (is_integer(lhs.dtype) and is_integer(rhs.dtype))
    return {f: "whole" if truncated and kind == "sum" else kind for f, kind in rounded_kinds(kinds, result).items()}


def _bilinear_passthrough(lhs: Any, rhs: Any, result: Any) -> str:
    """Either operand may be a partial sum; but an integer operand narrower than the result may not, since its sum wraps
    where the result's does not."""
    if result is None or not (is_integer(lhs) and is_integer(rhs)):
        return EITHER_OPERAND
    bits = jnp.iinfo(result).bits if is_integer(result) else math.inf
    passing = [str(i) for i, d in enumerate((lhs, rhs)) if jnp.iinfo(d).bits >= bits]
    return f"sum: {' '.join(passing)}" if passing else ""


def ragged_dot_general(
    lhs: Aval,
    rhs: Aval,
    group_sizes: Aval,
    *,
    ragged_dot_dimension_numbers: Any,
    preferred_element_type: Any = None,
    **params: Any,
) -> Rule:
    """As `dot_general`. Groups that a contracted dimension is made of are parallel; else the matrix of each group is
    multiplied with its rows alone, so that devices with some of the groups have zeros for the other rows."""
    numbers = ragged_dot_dimension_numbers.dot_dimension_numbers
    (ragged,) = ragged_dot_dimension_numbers.lhs_ragged_dimensions
    contracted = numbers[0][0]
    left, right, out = _dot_labels(len(lhs.shape), len(rhs.shape), numbers)
    rows = left[ragged]
    for d in ragged_dot_dimension_numbers.rhs_group_dimensions:
        out.remove(right[d])
        right[d] = "g"
    if ragged in contracted:
        out.insert(0, "g")
    operands: list[list[Label]] = [[*left], [*right], [None] * len(group_sizes.shape)]
    if len(group_sizes.shape) > 1:
        kept = dict.fromkeys((*left, *right, *out), "whole")
        return build(operands, [out], kept, reason="its group sizes differ along further dimensions")
    kinds = {left[d]: "sum" for d in contracted}
    if ragged not in contracted:
        kinds["g"] = "sum"
    kinds = _partial_kinds(kinds, lhs, rhs, _result_dtype(lhs, preferred_element_type))
    params |= {
        "ragged_dot_dimension_numbers": ragged_dot_dimension_numbers,
        "preferred_element_type": preferred_element_type,
        "out_sharding": None,
    }
    sides = (left, right, (), out)
    places = [(i, d) for i, dims in enumerate(sides) for d, f in enumerate(dims) if f == rows]
    groups = next(((i, d) for i, dims in enumerate(sides) for d, f in enumerate(dims) if f == "g"), None)
    rule = build(operands, [out], kinds, _bilinear_passthrough(lhs.dtype, rhs.dtype, preferred_element_type))
    if groups is None:
        return rule
    dims, count = (*rule.operands, *rule.results), math.prod(group_sizes.shape)
    (group,) = dims[groups[0]][groups[1]]
    free = (n for n, f in zip(rhs.shape, right, strict=True) if f not in (*left, "g"))
    flops, with_rows = 2.0 * math.prod(lhs.shape) * math.prod(free), [x for x, _ in places if x < 2]

    def work(parts: Mapping[str, int]) -> LocalWork:
        """Without a kernel: every row with the matrices of all groups, of as many masked copies of the rows."""
        shards = [math.prod(parts.get(f, 1) for dim in dims[x] for f in dim) for x in with_rows]
        own = [math.prod(x.shape) * x.dtype.itemsize for x in ((lhs, rhs)[x] for x in with_rows)]
        copied = sum(n / k for n, k in zip(own, shards, strict=True)) * count / parts.get(group, 1)
        return LocalWork(flops * count / math.prod(parts.values()), int(copied))

    local = sharded_ragged_dot(partial(lax.ragged_dot_general, **params), places, groups)
    return replace(rule, local=replace(local, work=work))


def scaled_dot(
    lhs: Aval,
    rhs: Aval,
    *scales: Aval,
    dimension_numbers: DimensionNumbers,
    preferred_element_type: Any = None,
    **_: Any,
) -> Rule:
    """As `dot_general`, up to rounding. Of contracted dimensions, blocks that share a scale are not split."""
    left, right, out = _dot_labels(len(lhs.shape), len(rhs.shape), dimension_numbers)
    operands: list[list[Label]] = [list(left), list(right)]
    shapes = [lhs.shape, rhs.shape]
    for i, scale in enumerate(scales):
        base = (left, right)[i % 2]
        operands.append(
            [
                f if n > 1 or shapes[i % 2][d] == 1 else None
                for d, (f, n) in enumerate(zip(base, scale.shape, strict=True))
            ]
        )
        shapes.append(scale.shape)
    sizes: dict[str, int] = {}
    kinds: dict[str, str] = {}
    for d in dimension_numbers[0][0]:
        f = left[d]
        places = [(i, j) for i, dims in enumerate(operands) for j, x in enumerate(dims) if x == f]
        common = math.gcd(*(shapes[i][j] for i, j in places))
        sizes[f] = common
        kinds[f] = "sum"
        for i, j in places:
            rest = f"{f} rest {shapes[i][j]}"
            sizes[rest] = shapes[i][j] // common
            kinds[rest] = "whole"
            operands[i][j] = (f, rest)
    kinds = _partial_kinds(kinds, lhs, rhs, _result_dtype(lhs, preferred_element_type))
    return build(operands, [out], kinds, "", sizes)


def conv_general_dilated(
    lhs: Aval,
    rhs: Aval,
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: Any,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    preferred_element_type: Any = None,
    **rest: Any,
) -> Rule:
    """Batch and output features are parallel, input features leave partial sums. Spatial dimensions exchange halos;
    where windows are as large as the image (the gradient of a convolution's window) they leave partial sums too.

    Groups, of features or of the batch, are a factor of their own, major in the dimensions that they divide. XLA (JAX
    0.12) only exchanges the halos itself. Its own partitioning gives wrong numbers with features sharded beside spatial
    dimensions, and with input features sharded in groups of the batch, which are therefore whole, as are halos there;
    with groups sharded over one of several mesh axes it corrupts memory. Where spatial dimensions are summed over,
    halos are exchanged before each device's own convolution; other spatial dimensions that need halos are then kept
    whole.
    """
    (n, c, *space), (o, i, *kernel), (out_n, out_o, *out_space) = dimension_numbers
    groups = max(feature_group_count, batch_group_count)
    sizes = {
        "group": groups,
        "batch": lhs.shape[n] // batch_group_count,
        "in": rhs.shape[i],
        "out": rhs.shape[o] // groups,
    }
    kinds = {"in": "sum"}
    left: list[Label] = [None] * len(lhs.shape)
    right: list[Label] = [None] * len(rhs.shape)
    out: list[Label] = [None] * len(lhs.shape)
    left[n] = ("group", "batch") if batch_group_count > 1 else "batch"
    left[c] = ("group", "in") if feature_group_count > 1 else "in"
    right[o] = out[out_o] = ("group", "out") if groups > 1 else "out"
    right[i], out[out_n] = "in", "batch"
    halo_windows: dict[str, HaloWindow] = {}
    summed: list[tuple[int, int, HaloWindow]] = []
    """Spatial dimensions that are summed over: index, size of the result, and what shards read."""
    for d, (at, k, to) in enumerate(zip(space, kernel, out_space, strict=True)):
        shape = (lhs.shape[at], rhs.shape[k])
        geometry = (window_strides[d], padding[d], lhs_dilation[d], rhs_dilation[d])
        left[at], out[to] = sliding_dim(f"s{d}", *shape, *geometry, kinds, sizes, halo_windows)
        if left[at] is None:
            after = output_size(*shape, *geometry)
            left[at], right[k] = contracted_spatial_dim(f"s{d}", *shape, after, *geometry, kinds, sizes, halo_windows)
            if left[at] is not None:
                summed.append((d, after, halo_windows[f"s{d}"]))
    halos = [Halo(0, at, halo_windows[f"s{d}"]) for d, at in enumerate(space) if f"s{d}" in halo_windows]
    windows = any(
        left[at] is not None and right[k] is None and rhs.shape[k] > 1 for at, k in zip(space, kernel, strict=True)
    )
    always_local = windows or groups > 1
    shared = "batch" if batch_group_count > 1 else "in"
    if groups > 1 and sizes[shared] > 1:  # a shard of each group is not a shard of the whole dimension
        kinds[shared] = "whole"
    kinds = _partial_kinds(kinds, lhs, rhs, _result_dtype(lhs, preferred_element_type))
    if batch_group_count > 1 or summed:
        kinds = {f: "whole" if kind == "halo" else kind for f, kind in kinds.items()}

    def shard_padding(w: Any) -> list[tuple[int, int]]:
        """The padding for a shard of the image that has its halos, and a shard ``w`` of the window."""
        found = [(low, high) for low, high in padding]
        for d, after, read in summed:
            own = w.shape[kernel[d]]
            if own < read.output_size:
                rows = sum(read.halo_rows(read.output_size // own), read.input_size * own // read.output_size)
                low = padding[d][0] - read.halo_rows(read.output_size // own)[0] * read.base_dilation
                end = (after - 1) * window_strides[d] + (own - 1) * read.stride
                found[d] = low, end - (rows - 1) * read.base_dilation - low
        return found

    def on_shard(x: Any, w: Any) -> Any:
        """The convolution of two shards: with the groups and rows that they have."""
        return lax.conv_general_dilated_p.bind(
            x,
            w,
            window_strides=window_strides,
            padding=tuple(shard_padding(w)),
            lhs_dilation=lhs_dilation,
            rhs_dilation=rhs_dilation,
            dimension_numbers=dimension_numbers,
            preferred_element_type=preferred_element_type,
            feature_group_count=max(1, x.shape[c] // max(1, w.shape[i])),
            batch_group_count=max(1, x.shape[n] // max(1, sizes["batch"])),
            **rest,
        )

    return build(
        [left, right],
        [out],
        kinds,
        _bilinear_passthrough(lhs.dtype, rhs.dtype, preferred_element_type),
        sizes,
        local=per_shard(on_shard) if always_local else replace(per_shard(on_shard), used_when="scattered"),
        halos=halos,
    )


RULES: dict[str, RuleFn] = {
    "conv_general_dilated": conv_general_dilated,
    "dot_general": dot_general,
    "ragged_dot_general": ragged_dot_general,
    "scaled_dot": scaled_dot,
}
TABLE = table(RULES)
