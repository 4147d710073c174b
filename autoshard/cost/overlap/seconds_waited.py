"""What of a reshard's seconds a device waits for.

The share `Hardware.hidden_collectives` of a reshard is hidden, as far as the products beside it (`OpKind.beside`) last.
Less of one in a ring is, and a ring may take longer (`Hideable`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from autoshard.ir.graph import OpKind
from autoshard.machine.mesh import LogicalMesh


class Hideable(NamedTuple):
    """What of the seconds of a reshard can be hidden, as numbers or arrays."""

    share: Any = 1.0
    """Where it is done before the products beside it are."""
    outlasts: Any = 0.0
    """By how much longer it takes in a ring than that, of its seconds: what no product is left for is waited for."""


ALL, NOTHING = Hideable(), Hideable(0.0)


def seconds_waited(seconds: Any, kind: OpKind, position: int, mesh: LogicalMesh, part: Hideable = ALL) -> Any:
    """The part of ``seconds``, a number or an array, in which a device waits for the reshard of the operand or result
    at this position.

    Args:
      part: what of them can be hidden (`autoshard.cost.overlap.node_reshards.hideable`).
    """
    beside = kind.beside[position] if kind.beside is not None else 0.0
    if not beside:
        return seconds
    hidden = mesh.hardware.hidden_collectives * part.share * seconds
    return seconds - np.maximum(np.minimum(hidden, beside - part.outlasts * seconds), 0.0)
