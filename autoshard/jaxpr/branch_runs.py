"""How often each branch of a conditional runs, said in the name of its operation, which HLO keeps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal

import jax

_NAMED = re.compile(r"\bruns((?:_\d+)+)_of_(\d+)(_together)?/cond$")


def branch_runs(runs: Sequence[int], of: int, *, together: bool = False) -> Any:
    """A context in which a conditional is traced of whose ``of`` runs so many take each branch.

    Args:
      together: all devices take the same branch at a time; else those of a pipeline's stage take one of their own.
    """
    return jax.named_scope(f"runs_{'_'.join(map(str, runs))}_of_{of}{'_together' * together}")


def branches_of_stages(operation: str) -> Literal["apart", "together"] | None:
    """Of a conditional of this ``op_name``, whether the stages of a pipeline take branches of their own, or the same;
    None where it is not the pipeline's."""
    named = _NAMED.search(operation)
    return None if named is None else "together" if named[3] else "apart"


def branch_shares(operation: str) -> tuple[Fraction, ...]:
    """By branch, the share of its runs of a conditional of this ``op_name``; empty where that does not say so."""
    named = _NAMED.search(operation)
    return tuple(Fraction(int(n), int(named[2])) for n in named[1][1:].split("_")) if named else ()
