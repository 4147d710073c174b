"""Memory kinds in a lowered module, for devices that are only described: shardings over such have none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax._src.lib.mlir import ir

_KIND, _ALIAS = "mhlo.memory_kind", "tf.aliasing_output"


def set_memory_kinds(
    lowered: jax.stages.Lowered, arguments: Sequence[str | None], results: Sequence[str | None]
) -> None:
    """Writes into the module of ``lowered`` in which memory its arguments and results are.

    A `NamedSharding` over devices of which XLA knows no memories, as GPUs that are not here, drops its memory kind. JAX
    then lowers an argument in the host's memory as one on the device, and may donate it to a result of its shape in
    another memory: such a pair is undone, and what it held is donated to results in its own memory.

    Args:
      arguments: the memory kind of each flat argument, as `jax.jit` was given them; None: the device's.
      results: the same of each result.
    """
    lowering: Any = lowered._lowering
    constants, kept = len(lowering.const_args), sorted(lowering.compile_args["kept_var_idx"])
    given = [arguments[i - constants] or "device" for i in kept if i >= constants]
    made = [kind or "device" for kind in results]
    module = lowering.stablehlo()
    with module.context:
        main = next(f for f in module.body.operations if ir.StringAttr(f.attributes["sym_name"]).value == "main")
        first = len(main.arguments) - len(given), len(main.type.results) - len(made)  # after constants and tokens
        types = list(map(str, main.type.inputs))[first[0] :], list(map(str, main.type.results))[first[1] :]
        ends = [list(zip(kinds, of, strict=True)) for kinds, of in zip((given, made), types, strict=True)]
        attributes = [[{x.name: x.attr for x in of} for of in found] for found in (main.arg_attrs, main.result_attrs)]
        for found, start, kinds in zip(attributes, first, (given, made), strict=True):
            for of, kind in zip(found[start:], kinds, strict=True):
                of[_KIND] = ir.StringAttr.get(kind)
        _match_donated(attributes[0][first[0] :], ends[0], ends[1], first[1])
        main.arg_attrs, main.result_attrs = (
            ir.ArrayAttr.get(list(map(ir.DictAttr.get, found))) for found in attributes
        )


def _match_donated(
    arguments: Sequence[dict[str, Any]],
    given: Sequence[tuple[str, str]],
    made: Sequence[tuple[str, str]],
    first: int,
) -> None:
    """Undoes donations between memories, and donates what they held to results that no argument is donated to.

    Args:
      arguments: attributes of each; changed in place.
      given: memory kind and type of each argument.
      made: the same of each result, the first of which is number ``first``.
    """
    donated = {i: ir.IntegerAttr(of[_ALIAS]).value - first for i, of in enumerate(arguments) if _ALIAS in of}
    wrong = [i for i, o in donated.items() if given[i] != made[o]]
    free = set(range(len(made))) - {o for i, o in donated.items() if i not in wrong}
    for i in wrong:
        like = arguments[i].pop(_ALIAS).type
        if (o := next((o for o in sorted(free) if made[o] == given[i]), None)) is not None:
            free.remove(o)
            arguments[i][_ALIAS] = ir.IntegerAttr.get(like, o + first)
