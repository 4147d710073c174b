"""Passes over programs, one a file or a folder."""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.passes.attention import Attention
from autoshard.passes.dead_code import DeadCode
from autoshard.passes.one_hot import OneHot
from autoshard.passes.recompute import Recompute
from autoshard.passes.sums import Sums
from autoshard.rewrite import Pass

KNOWN: Mapping[str, type[Pass]] = {p.name: p for p in (Attention, DeadCode, OneHot, Recompute, Sums)}
"""What a user can name in ``passes=[...]``."""

__all__ = ["KNOWN", "Attention", "DeadCode", "OneHot", "Recompute", "Sums"]
