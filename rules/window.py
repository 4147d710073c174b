"""Windows that slide over dimensions: pooling, and the geometry that convolution shares with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autoshard.ir.halo import Halo, Window
from autoshard.ir.rule import Aval, Rule, RuleFn
from autoshard.rules.builders import Label, alone, build, table


def length(size: int, window: int, stride: int, padding: tuple[int, int], base: int, dilation: int) -> int:
    """The size of a dimension after a window slides over it."""
    spread = (size - 1) * base + 1 if size else 0
    return max(0, (spread + padding[0] + padding[1] - (window - 1) * dilation - 1) // stride + 1)


def slide(
    name: str,
    size: int,
    window: int,
    stride: int,
    padding: tuple[int, int],
    base: int,
    dilation: int,
    kinds: dict[str, str],
    sizes: dict[str, int],
    reads: dict[str, Window],
) -> tuple[Label, Label]:
    """Labels of a dimension before and after a window slides over it; adds to ``kinds``, ``sizes``, and ``reads``, what
    parts read.

    ``base`` and ``dilation`` are the dilations of the dimension and of the window. The common part of both
    sizes is the factor ``name``, major in each. It is parallel where windows tile the dimension; where they
    overlap or reach over the border, neighbours exchange edges. A window of more than half the dimension
    would need more than its neighbours: such a dimension stays whole, as do those without a common part.
    """
    reach = (window - 1) * dilation + 1
    spread = (size - 1) * base + 1 if size else 0
    after = length(size, window, stride, padding, base, dilation)
    common = math.gcd(size, after)
    tiles = tuple(padding) == (0, 0) and base == 1 and reach <= stride and size == after * stride
    near = max(reach, *padding) <= spread // 2
    if common < 2 or not (tiles or near):
        return (name, name) if size == after == 1 else (None, None)
    sizes |= {name: common, f"{name} in": size // common, f"{name} out": after // common}
    kinds |= {f"{name} in": "whole", f"{name} out": "whole"}
    if not tiles:
        kinds[name] = "halo"
        reads[name] = Window(size, after, stride, padding[0], reach, base)
    return (name, f"{name} in"), (name, f"{name} out")


def meet(
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
    reads: dict[str, Window],
) -> tuple[Label, Label]:
    """Labels of a dimension and of a window that is about as large, so that it is summed over and few rows, ``after``,
    are left; as in the gradient of a convolution's window, where strides are dilations and the reverse.

    The common part is split in both, and neighbours send the dimension's edges. Where a part of one would begin
    elsewhere than with a part of the other, or windows reach over more than half the dimension, both stay whole.
    """
    reach = (after - 1) * stride + 1
    read = Window(size, window, dilation, padding[0], reach, base)
    common = math.gcd(size, window)
    if common < 2 or after < 1 or not read.even or max(reach, *padding) > ((size - 1) * base + 1) // 2:
        return None, None
    sizes |= {name: common, f"{name} in": size // common, f"{name} by": window // common}
    kinds |= {name: "sum", f"{name} in": "whole", f"{name} by": "whole"}
    reads[name] = read
    return (name, f"{name} in"), (name, f"{name} by")


def _windows(
    shape: Sequence[int],
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    base_dilation: Sequence[int] | None,
    window_dilation: Sequence[int] | None,
) -> tuple[list[Label], list[Label], dict[str, str], dict[str, int], list[Halo]]:
    kinds: dict[str, str] = {}
    sizes: dict[str, int] = {}
    reads: dict[str, Window] = {}
    ones = (1,) * len(shape)
    parts = zip(
        shape, window_dimensions, window_strides, padding, base_dilation or ones, window_dilation or ones, strict=True
    )
    pairs = [
        slide(f"d{d}", size, window, stride, edges, base, dilation, kinds, sizes, reads)
        for d, (size, window, stride, edges, base, dilation) in enumerate(parts)
    ]
    halos = [Halo(0, d, reads[f"d{d}"]) for d in range(len(shape)) if f"d{d}" in reads]
    return [a for a, _ in pairs], [b for _, b in pairs], kinds, sizes, halos


def _without_edges(kinds: dict[str, str]) -> dict[str, str]:
    """``kinds`` where no edges are exchanged."""
    return {f: "whole" if kind == "halo" else kind for f, kind in kinds.items()}


def reduce_window(lets: str) -> RuleFn:
    """The reduction of one operand over windows."""

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
        before, after, kinds, sizes, halos = _windows(
            operand.shape, window_dimensions, window_strides, padding, base_dilation, window_dilation
        )
        return build([before], [after], kinds, lets, sizes, halos=halos)

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
    """Any reduction of several operands; the second half of ``avals`` are its initial values, scalars.

    XLA (JAX 0.12) dies when it partitions several dilated operands.
    """
    count = len(avals) // 2
    before, after, kinds, sizes, halos = _windows(
        avals[0].shape, window_dimensions, window_strides, padding, base_dilation, window_dilation
    )
    dilated = count > 1 and max(base_dilation, default=1) > 1
    return build(
        [*[before] * count, *[[]] * count],
        [after] * count,
        _without_edges(kinds) if dilated else kinds,
        "",
        sizes,
        local=alone() if dilated else None,
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
    """Picks from each window of ``tangents`` the element where ``operand`` is extreme; linear in ``tangents``.

    It is lowered to a reduction of two operands; for their dilation see there.
    """
    before, after, kinds, sizes, halos = _windows(
        operand.shape, window_dimensions, window_strides, padding, base_dilation, window_dilation
    )
    dilated = max(base_dilation, default=1) > 1
    return build(
        [before, before],
        [after],
        _without_edges(kinds) if dilated else kinds,
        "sum: 0",
        sizes,
        local=alone() if dilated else None,
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
    """Adds each element of ``source`` where the window of ``operand`` is extreme; linear in ``source``.

    XLA (JAX 0.12) gives wrong numbers where split windows overlap, and in double precision an error.
    """
    before, after, kinds, sizes, _halos = _windows(
        operand.shape, window_dimensions, window_strides, padding, None, None
    )
    return build([after, before], [before], _without_edges(kinds), "sum: 0", sizes, local=alone())


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
    """The general form, of which nothing is known but its windows; overlapping ones as above."""
    before, after, kinds, sizes, _halos = _windows(
        operand.shape, window_dimensions, window_strides, padding, None, None
    )
    return build([before, after, []], [before], _without_edges(kinds), "", sizes, local=alone())


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
