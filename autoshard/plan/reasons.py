"""Sentences for the reasons that a plan records as data."""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.plan.decisions import Constraint, ConstraintReason, Place, PlaceReason

_PLACES: Mapping[PlaceReason, str] = {
    "pinned": "pinned by the user",
    "first_plan": "kept from the step's first plan",
    "placed": "as it is placed already",
    "loading": "split further than it is read, so that less is loaded",
    "returned": "one spec for the argument and the result that may come back as it",
    "solved": "cheapest by the cost model",
    "chosen": "as in the best layout weighed",
}
_CONSTRAINTS: Mapping[ConstraintReason, str] = {
    "pinned": "pinned in the step",
    "product": "result of a product",
    "resharded": "result",
    "operand": "operand",
    "before_operand": "as before it is resharded",
    "as_computed": "result as computed",
    "carried": "carried into or out of a region",
    "guarded_operand": "operand that XLA must not split by itself",
    "guarded_result": "result that XLA must not split by itself",
}
_GROUPS: Mapping[ConstraintReason, str] = {
    "pinned": "pinned in the step",
    "product": "on results of products",
    "resharded": "on resharded results",
    "operand": "on resharded operands",
    "before_operand": "on values before they are resharded",
    "as_computed": "on results as computed",
    "carried": "on values carried into or out of regions",
    "guarded_operand": "on operands that XLA must not split by itself",
    "guarded_result": "on results that XLA must not split by itself",
}


def place_reason(place: Place) -> str:
    """Why an argument or a result has its spec; the empty string where it is replicated for no stated reason."""
    parts = [f"spec of {place.replaces}, which it replaces"] if place.reason == "replaces" else []
    parts += [_PLACES[place.reason]] if place.reason in _PLACES else []
    parts += [f"spec of {', '.join(place.sources)}, as like= asks"] if place.reason == "shared" else []
    parts += [f"propagated from {', '.join(place.sources)}"] if place.sources and place.reason != "shared" else []
    return "; ".join(parts)


def constraint_reason(c: Constraint) -> str:
    """Why an intermediate is constrained: ``operand, resharded from [data, _]``."""
    return _CONSTRAINTS[c.reason] + (f", resharded from {c.resharded_from}" if c.resharded_from is not None else "")


def constraint_group(reason: ConstraintReason) -> str:
    """What the constraints of one reason have in common: ``on resharded operands``."""
    return _GROUPS[reason]
