"""witness: whether Shardy, asked anew, comes to the layouts that a plan says.

The lowered step states the layout of every argument, the constraints and the islands. What it says of its results is
taken out of a copy, and Shardy propagates: a result that it lays out otherwise will be moved at the step's end,
and an argument that it lays out otherwise has been lowered wrongly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
from jax.extend.mlir import ir

from autoshard import jaxpr as jx
from autoshard.ir import shardy_mlir
from autoshard.ir.spec import Spec
from autoshard.plan.decisions import Place
from autoshard.plan.record import PlanRecord

_SHARDING = re.compile(r"#sdy\.sharding<@\w+, \[(.*?)\](?:, .*)?>")


@dataclass(frozen=True)
class Difference:
    """An argument or result that Shardy lays out otherwise than planned."""

    path: str
    planned: Spec
    found: str
    """As Shardy writes it: ``{"data"}, {}``."""

    def __str__(self) -> str:
        return f"{self.path}: planned as {self.planned}, Shardy lays it out as [{self.found}]"


def comes_back(lowered: jax.stages.Lowered, plan: PlanRecord) -> tuple[Difference, ...]:
    """Where Shardy lays out arguments and results otherwise than ``plan``; empty when nowhere.

    Args:
      lowered: the step as planned, ``step.lower(...)``.
      plan: its plan.
    """
    with shardy_mlir.context():
        module = ir.Module.parse(lowered.as_text())
        main = _main(module)
        main.attributes["res_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get({})] * len(plan.outputs))
        shardy_mlir.apply_passes(module, shardy_mlir.PROPAGATION_PIPELINE)
        arguments, results = (_written(_main(module), name) for name in ("arg_attrs", "res_attrs"))
    used = [plan.inputs[i] for i in jx.kept_arguments(lowered)]
    return (*_compared(used, arguments, plan), *_compared(plan.outputs, results, plan))


def _main(module: ir.Module) -> ir.Operation:
    return next(
        op.operation
        for op in module.body.operations
        if op.operation.name == "func.func" and ir.StringAttr(op.attributes["sym_name"]).value == "main"
    )


def _written(main: ir.Operation, name: str) -> list[str]:
    """The dimensions of each argument's or result's sharding, as text; "" where it says none."""
    if name not in main.attributes:
        return []
    dicts = map(ir.DictAttr, ir.ArrayAttr(main.attributes[name]))
    found = [str(d["sdy.sharding"]) if "sdy.sharding" in d else "" for d in dicts]
    return [m[1] if (m := _SHARDING.match(text)) else text for text in found]


def _compared(places: Sequence[Place], found: Sequence[str], plan: PlanRecord) -> Iterator[Difference]:
    """Places in the order of the program's; what stands before them are constants that JAX passes in."""
    texts = [*found, *[""] * (len(places) - len(found))][-len(places) :] if places else []
    for place, text in zip(places, texts, strict=True):
        got = text.replace("?", "").replace("{, ", "{") if text else ", ".join("{}" for _ in place.shape)
        want = ", ".join("{" + ", ".join(f'"{a}"' for a in axes) + "}" for axes in place.spec.dims)
        if got != want:
            yield Difference(place.path, place.spec, got)
