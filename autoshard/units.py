"""Bytes and seconds as text in the unit that suits their size."""

from __future__ import annotations

import math


def size_text(size: float, digits: int = 1) -> str:
    """``size`` bytes in a binary unit: ``12 B``, ``1.5 MiB``."""
    power = min(4, int(math.log2(max(1.0, abs(size))) // 10))
    return f"{size:.0f} B" if power == 0 else f"{size / 1024**power:.{digits}f} {' KMGT'[power]}iB"


def time_text(seconds: float) -> str:
    """``seconds`` in the largest unit that leaves at least 1 before the point: ``1.50 ms``."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if abs(seconds) * factor >= 0.9995:
            return f"{seconds * factor:.{2 if abs(seconds) * factor < 9.995 else 1}f} {unit}"
    return f"{seconds * 1e9:.1f} ns" if seconds else "0 s"
