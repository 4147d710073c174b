"""Every primitive of the installed JAX has a rule, a structure, or a reason to stay whole."""

from __future__ import annotations

import importlib
import sys

import pytest
from jax.extend.core import Primitive

from autoshard.errors import RuleError
from autoshard.rules import FAMILIES, KEPT_WHOLE, STRUCTURAL, TABLE, join
from autoshard.rules.validation.known_gaps import MISSING_PASSTHROUGH, MISSING_SPLITS

OTHER_VERSIONS = {
    "0.11.2": {"program_order", "reduced_vary_cast_p", "vary_unreduced_cast_p"},
    "0.12": {"pbroadcast_dynamic", "polynomial", "reduced_vary_cast", "vary_unreduced_cast"},
}
"""Names that only one of the supported versions of JAX has."""
MODULES = ("buffer_callback", "custom_partitioning", "multihost_utils", "pallas", "sparse")
"""Of `jax.experimental`: those that define primitives and that JAX does not import by itself."""
KERNELS = (
    *("jax._src.pallas.einshape", "jax._src.pallas.fuser", "jax._src.pallas.mosaic"),
    *("jax._src.tpu_custom_call", "jax.experimental.mosaic"),
)
"""Modules that JAX imports for kernels: their primitives are in no step outside of one."""
RULED = [name for family in FAMILIES for name in family.RULES]


def installed() -> set[str]:
    """The names of the primitives that JAX's modules define."""
    for module in MODULES:
        importlib.import_module(f"jax.experimental.{module}")
    modules = [m for n, m in sys.modules.items() if n.split(".")[0] == "jax" and not n.startswith(KERNELS)]
    return {p.name for m in modules for p in list(vars(m).values()) if isinstance(p, Primitive)}


def test_none_is_unclassified():
    assert sorted(installed() - {*RULED, *STRUCTURAL, *KEPT_WHOLE}) == []


def test_none_is_classified_twice():
    names = [*RULED, *STRUCTURAL, *KEPT_WHOLE]
    assert sorted(n for n in set(names) if names.count(n) > 1) == []


def test_every_name_is_a_primitive():
    known = installed().union(*OTHER_VERSIONS.values())
    assert sorted({*RULED, *STRUCTURAL, *KEPT_WHOLE} - known) == []


def test_every_rule_is_in_the_table():
    assert {p.name for p in TABLE} == set(RULED) & installed()


@pytest.mark.parametrize("names", [MISSING_PASSTHROUGH, MISSING_SPLITS])
def test_notes_are_about_primitives_with_rules(names):
    assert sorted(set(names) - set(RULED)) == []


def test_a_primitive_with_two_rules_is_refused():
    first = FAMILIES[0].TABLE
    with pytest.raises(RuleError, match="two tables have a rule for conv_general_dilated, dot_general"):
        join(first, first)
