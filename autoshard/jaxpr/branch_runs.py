"""How often each branch of a conditional runs, said in the name of its operation, which HLO keeps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax

_NAMED = re.compile(r"\bruns((?:_\d+)+)_of_(\d+)/cond$")


def branch_runs(runs: Sequence[int], of: int) -> Any:
    """A context in which a conditional is traced of whose ``of`` runs so many take each branch."""
    return jax.named_scope(f"runs_{'_'.join(map(str, runs))}_of_{of}")


def branch_shares(operation: str) -> tuple[Fraction, ...]:
    """By branch, the share of its runs of a conditional of this ``op_name``; empty where that does not say so."""
    named = _NAMED.search(operation)
    return tuple(Fraction(int(n), int(named[2])) for n in named[1][1:].split("_")) if named else ()
