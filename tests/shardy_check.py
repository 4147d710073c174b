"""Runs Shardy's MLIR passes on lowered programs: whether its propagation comes to the layouts that a plan states.

The lowered step states the layout of every argument, the constraints and the islands. What it says of its results is
taken out of a copy, and Shardy propagates: a result that it shards otherwise will be moved at the step's end,
and an argument that it shards otherwise has been lowered wrongly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
from jax.extend.mlir import ir, passmanager
from jax.interpreters import mlir

from autoshard.ir.spec import Spec
from autoshard.plan.decisions import Place
from autoshard.plan.record import PlanRecord

PROPAGATION_PIPELINE = (
    "builtin.module(sdy-propagation-pipeline,"
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true}),func.func(sdy-reshard-to-collectives))"
)
"""Shardy's propagation, and its reshards as explicit collectives: what XLA does before it partitions."""
OP_RULES_PIPELINE = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
"""Attaches Shardy's sharding rule to each operation."""
_SHARDING = re.compile(r"#sdy\.sharding<@\w+, \[(.*?)\](?:, .*)?>")


@dataclass(frozen=True)
class Difference:
    """An argument or result that Shardy shards otherwise than planned."""

    path: str
    planned: Spec
    found: str
    """As Shardy writes it: ``{"data"}, {}``."""

    def __str__(self) -> str:
        return f"{self.path}: planned as {self.planned}, Shardy shards it as [{self.found}]"


def apply_passes(module: ir.Module, pipeline: str) -> None:
    """Runs a pass pipeline on ``module``, in place, inside its context. JAX caches modules: pass a copy."""
    passmanager.PassManager.parse(pipeline).run(module.operation)


def propagated(lowered: jax.stages.Lowered) -> str:
    """The lowered program after Shardy's propagation: the sharding of every value, and explicit collectives."""
    with mlir.make_ir_context():
        module = ir.Module.parse(lowered.as_text())
        apply_passes(module, PROPAGATION_PIPELINE)
        return str(module)


def comes_back(lowered: jax.stages.Lowered, plan: PlanRecord) -> tuple[Difference, ...]:
    """Where Shardy shards arguments and results otherwise than ``plan``; empty when nowhere.

    Args:
      lowered: the step as planned, ``step.lower(...)``.
      plan: its plan.
    """
    with mlir.make_ir_context():
        module = ir.Module.parse(lowered.as_text())
        main = _main(module)
        main.attributes["res_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get({})] * len(plan.outputs))
        apply_passes(module, PROPAGATION_PIPELINE)
        arguments, results = (_written(_main(module), name) for name in ("arg_attrs", "res_attrs"))
    used = [plan.inputs[i] for i in sorted(lowered._lowering.compile_args["kept_var_idx"])]  # the others are dropped
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
