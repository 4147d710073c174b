"""Rules of windows that slide over dimensions: pooling, and the geometry that convolution shares with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autoshard.ir.halo import Halo, HaloWindow
from autoshard.ir.rule import Aval, Rule, RuleFn
from autoshard.rules.builders import Label, build, per_shard, table


def output_size(size: int, window: int, stride: int, padding: tuple[int, int], base: int, dilation: int) -> int:
    """The number of places of a window over a dimension: the size of the result's dimension.

    Args:
      base, dilation: the dilations of the dimension and of the window.
    """
    spread = (size - 1) * base + 1 if size else 0
    return max(0, (spread + padding[0] + padding[1] - (window - 1) * dilation - 1) // stride + 1)


def sliding_dim(
    name: str,
    size: int,
    window: int,
    stride: int,
    padding: tuple[int, int],
    base: int,
    dilation: int,
    kinds: dict[str, str],
    sizes: dict[str, int],
    halo_windows: dict[str, HaloWindow],
) -> tuple[Label, Label]:
    """Labels of an operand's dimension that a window slides over, and of the result's.

    The greatest common divisor of both sizes is the factor ``name``, major in each. It is parallel where windows tile
    the dimension; where they overlap or reach into the padding, it is a halo factor. A window of more than half the
    dimension would read from beyond its neighbours: such a dimension is kept whole, as is one without a common divisor.

    Args:
      base, dilation: the dilations of the dimension and of the window.
      kinds, sizes, halo_windows: of factors; those of this dimension are added.
    """
    reach = (window - 1) * dilation + 1
    spread = (size - 1) * base + 1 if size else 0
    after = output_size(size, window, stride, padding, base, dilation)
    common = math.gcd(size, after)
    tiles = tuple(padding) == (0, 0) and base == 1 and reach <= stride and size == after * stride
    near = max(reach, *padding) <= spread // 2
    if common < 2 or not (tiles or near):
        return (name, name) if size == after == 1 else (None, None)
    sizes |= {name: common, f"{name} in": size // common, f"{name} out": after // common}
    kinds |= {f"{name} in": "whole", f"{name} out": "whole"}
    if not tiles:
        kinds[name] = "halo"
        halo_windows[name] = HaloWindow(size, after, stride, padding[0], reach, base)
    return (name, f"{name} in"), (name, f"{name} out")


def contracted_spatial_dim(
    name: str,
    size: int,
    window: int,
    after: int,
    stride: int,
    padding: tuple[int, int],
    base: int,
    dilation: int,
    kinds: dict[str, str],
    sizes: dict[str, int],
    halo_windows: dict[str, HaloWindow],
) -> tuple[Label, Label]:
    """Labels of a dimension and of a window about as large, so that the product sums over both.

    That is the gradient of a convolution's window, where strides are dilations and the reverse. The greatest common
    divisor of both sizes is sharded in both, and neighbours send halos of the dimension. Where shards of the two would
    not be aligned, or windows reach over more than half the dimension, both are kept whole.

    Args:
      after: the size of the result's dimension.
      Others as in `sliding_dim`.
    """
    reach = (after - 1) * stride + 1
    read = HaloWindow(size, window, dilation, padding[0], reach, base)
    common = math.gcd(size, window)
    if common < 2 or after < 1 or not read.is_aligned or max(reach, *padding) > ((size - 1) * base + 1) // 2:
        return None, None
    sizes |= {name: common, f"{name} in": size // common, f"{name} by": window // common}
    kinds |= {name: "sum", f"{name} in": "whole", f"{name} by": "whole"}
    halo_windows[name] = read
    return (name, f"{name} in"), (name, f"{name} by")


def _window_labels(
    shape: Sequence[int],
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    base_dilation: Sequence[int] | None,
    window_dilation: Sequence[int] | None,
) -> tuple[list[Label], list[Label], dict[str, str], dict[str, int], list[Halo]]:
    kinds: dict[str, str] = {}
    sizes: dict[str, int] = {}
    halo_windows: dict[str, HaloWindow] = {}
    ones = (1,) * len(shape)
    parts = zip(
        shape, window_dimensions, window_strides, padding, base_dilation or ones, window_dilation or ones, strict=True
    )
    pairs = [
        sliding_dim(f"d{d}", size, window, stride, edges, base, dilation, kinds, sizes, halo_windows)
        for d, (size, window, stride, edges, base, dilation) in enumerate(parts)
    ]
    halos = [Halo(0, d, halo_windows[f"d{d}"]) for d in range(len(shape)) if f"d{d}" in halo_windows]
    return [a for a, _ in pairs], [b for _, b in pairs], kinds, sizes, halos


def _without_halos(kinds: dict[str, str]) -> dict[str, str]:
    """``kinds`` with halo factors kept whole."""
    return {f: "whole" if kind == "halo" else kind for f, kind in kinds.items()}


def reduce_window(passthrough: str) -> RuleFn:
    """The rule of a reduction of one operand over windows, with this passthrough."""

    def rule(
        operand: Aval,
        *,
        window_dimensions: Sequence[int],
        window_strides: Sequence[int],
        padding: Sequence[tuple[int, int]],
        base_dilation: Sequence[int],
        window_dilation: Sequence[int],
        **_: Any,
    ) -> Rule:
        before, after, kinds, sizes, halos = _window_labels(
            operand.shape, window_dimensions, window_strides, padding, base_dilation, window_dilation
        )
        return build([before], [after], kinds, passthrough, sizes, halos=halos)

    return rule


def reduce_window_any(
    *avals: Aval,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    base_dilation: Sequence[int],
    window_dilation: Sequence[int],
    **_: Any,
) -> Rule:
    """Any reduction of several operands over windows; the second half of ``avals`` are initial values, scalars.

    XLA (JAX 0.12) crashes when it partitions several dilated operands.
    """
    count = len(avals) // 2
    before, after, kinds, sizes, halos = _window_labels(
        avals[0].shape, window_dimensions, window_strides, padding, base_dilation, window_dilation
    )
    dilated = count > 1 and max(base_dilation, default=1) > 1
    return build(
        [*[before] * count, *[[]] * count],
        [after] * count,
        _without_halos(kinds) if dilated else kinds,
        "",
        sizes,
        local=per_shard() if dilated else None,
        halos=[replace(h, operand=i) for h in halos for i in range(count)],
    )


def select_and_gather_add(
    tangents: Aval,
    operand: Aval,
    *,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    base_dilation: Sequence[int],
    window_dilation: Sequence[int],
    **_: Any,
) -> Rule:
    """The element of ``tangents`` where the window of ``operand`` has its maximum or minimum; linear in ``tangents``.

    It is lowered to a reduction of two operands, which XLA cannot partition where they are dilated
    (`reduce_window_any`).
    """
    before, after, kinds, sizes, halos = _window_labels(
        operand.shape, window_dimensions, window_strides, padding, base_dilation, window_dilation
    )
    dilated = max(base_dilation, default=1) > 1
    return build(
        [before, before],
        [after],
        _without_halos(kinds) if dilated else kinds,
        "sum: 0",
        sizes,
        local=per_shard() if dilated else None,
        halos=[replace(h, operand=i) for h in halos for i in range(2)],
    )


def select_and_scatter_add(
    source: Aval,
    operand: Aval,
    *,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    **_: Any,
) -> Rule:
    """Adds each element of ``source`` where its window of ``operand`` has its maximum or minimum; linear in ``source``.

    XLA (JAX 0.12) gives wrong numbers where sharded windows overlap, and an error in double precision.
    """
    before, after, kinds, sizes, _halos = _window_labels(
        operand.shape, window_dimensions, window_strides, padding, None, None
    )
    return build([after, before], [before], _without_halos(kinds), "sum: 0", sizes, local=per_shard())


def select_and_scatter(
    operand: Aval,
    source: Aval,
    init_value: Aval,
    *,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    **_: Any,
) -> Rule:
    """`select_and_scatter_add` with any selection and reduction; only non-overlapping windows are sharded, as there."""
    before, after, kinds, sizes, _halos = _window_labels(
        operand.shape, window_dimensions, window_strides, padding, None, None
    )
    return build([before, after, []], [before], _without_halos(kinds), "", sizes, local=per_shard())


RULES: dict[str, RuleFn] = {
    "reduce_window": reduce_window_any,
    "reduce_window_max": reduce_window("max: 0"),
    "reduce_window_min": reduce_window("min: 0"),
    "reduce_window_sum": reduce_window("sum: 0"),
    "select_and_gather_add": select_and_gather_add,
    "select_and_scatter": select_and_scatter,
    "select_and_scatter_add": select_and_scatter_add,
}
TABLE = table(RULES)
