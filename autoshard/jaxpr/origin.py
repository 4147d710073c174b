"""Provenance of an equation: the user's source line, and its phase of automatic differentiation."""

from __future__ import annotations

import functools
import os
import re
import sysconfig
from collections.abc import Callable, Sequence
from typing import Any, Literal

from jax._src import api_util as _api
from jax._src import source_info_util as _source
from jax._src.ad_checkpoint import name_p as _name_p
from jax.extend.core import JaxprEqn

PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep
LIBRARIES = tuple(
    os.path.join(base, name) + os.sep
    for base in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    for name in ("jax", "flax", "optax", "chex", "autoshard")
) + (PACKAGE,)

RECOMPUTE = "recompute"
"""The scope of what the backward part makes again by autoshard's doing."""
_AGAIN = frozenset({RECOMPUTE, "rematted_computation"})
"""And by that of `jax.checkpoint`."""

_PART = re.compile(r"layers_(\d+)_to_(\d+)")


def user_line(traceback: Any) -> str:
    """``file:line`` of the user's code in a traceback; "" if there is none."""
    return _user_line(traceback, len(_source._exclude_paths), len(_source._include_paths))


@functools.lru_cache(maxsize=65536)
def _user_line(traceback: Any, exclusions: int, inclusions: int) -> str:
    """`user_line` under so many paths that libraries registered with JAX as theirs, or as the user's."""
    frames = list(_source.user_frames(traceback)) if traceback is not None else []
    chosen = next((f for f in frames if not f.file_name.startswith(LIBRARIES)), frames[0] if frames else None)
    return f"{chosen.file_name}:{chosen.start_line}" if chosen else ""


def name_arguments(fun: Callable[..., Any], names: Sequence[str]) -> None:
    """Has XLA's programs and profiles call the flat arguments of ``fun`` ``names``, as ``state['w']``; call it before
    ``fun`` is jitted."""
    given = _api.debug_info("jit", fun, tuple(names), {})
    fun.__dict__["__fun_debug_info__"] = given._replace(arg_names=tuple(names))


def source(eqn: JaxprEqn) -> str:
    """``file:line`` of the user's code that made the equation, outside JAX, Flax and Optax; "" if unknown."""
    return user_line(eqn.source_info.traceback)


def autodiff_phase(eqn: JaxprEqn) -> Literal["forward", "backward", ""]:
    """``"backward"`` of an equation made by transposition, ``"forward"`` of any other in a differentiated function."""
    transforms = _transforms(eqn)
    return "backward" if "transpose" in transforms else "forward" if "jvp" in transforms else ""


def outside_autodiff(eqn: JaxprEqn) -> JaxprEqn:
    """``eqn`` attributed to the same source line, in no phase of automatic differentiation and no scope."""
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=_source.NameStack()))


def is_backward(eqn: JaxprEqn) -> bool:
    """Whether the equation was made by transposing a differentiated function."""
    return autodiff_phase(eqn) == "backward"


def is_differentiated(eqn: JaxprEqn) -> bool:
    """Whether the equation is part of a differentiated function, forward or backward."""
    return "jvp" in _transforms(eqn)


def given_name(eqn: JaxprEqn) -> str | None:
    """The name that `jax.ad_checkpoint.checkpoint_name` gives the value that passes through ``eqn``, if it does."""
    return eqn.params["name"] if eqn.primitive is _name_p else None


def scopes(eqn: JaxprEqn) -> tuple[str, ...]:
    """The `jax.named_scope`s around the equation, from the outermost, as the user names them; not einsum's own."""
    found = [p.name for p in eqn.source_info.name_stack.stack if isinstance(p, _source.Scope)]
    ours = {*_AGAIN, "checkpoint"}
    return tuple(name for name in found if "->" not in name and name not in ours and not _PART.fullmatch(name))


def as_layers(eqn: JaxprEqn, first: int, end: int) -> JaxprEqn:
    """``eqn``, a scan over layers ``first`` to ``end`` of one that was cut, marked so; profiles show it."""
    stack = eqn.source_info.name_stack.extend(f"layers_{first}_to_{end}")
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def part_of_scan(eqn: JaxprEqn) -> tuple[int, str] | None:
    """Of a scan that `as_layers` marked, what is equal for the other parts of the scan that was cut."""
    *before, last = eqn.source_info.name_stack.stack or ("",)
    if not (isinstance(last, _source.Scope) and _PART.fullmatch(last.name)):
        return None
    return id(eqn.source_info.traceback), str(before)


def is_made_again(eqn: JaxprEqn) -> bool:
    """Whether the equation is a copy of one of the forward part, which the backward part runs again."""
    return any(isinstance(p, _source.Scope) and p.name in _AGAIN for p in eqn.source_info.name_stack.stack)


def _transforms(eqn: JaxprEqn) -> set[str]:
    """JAX's transformations that made the equation; not scopes that the user named."""
    return {part.name for part in eqn.source_info.name_stack.stack if isinstance(part, _source.Transform)}
