"""HLO's names of element types: their width, and the dtype under which a hardware table has their peak."""

from __future__ import annotations

import re

PEAK_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "s8": "int8",
    "u8": "int8",
}
"""By HLO name, the dtype under which `autoshard.machine.mesh.Hardware` has the peak FLOP/s."""


def bits(name: str) -> int:
    """Bits per element as stored: 4 for ``s4``, 8 for ``f8e4m3fn`` and ``pred``, 0 for ``token``."""
    if name == "pred":
        return 8
    digits = re.search(r"\d+", name)
    return int(digits[0]) if digits else 0


def peak_dtype(name: str) -> str:
    """The dtype whose peak FLOP/s products of this type have; an unknown name is returned as it is."""
    return PEAK_DTYPES.get(name, name)
