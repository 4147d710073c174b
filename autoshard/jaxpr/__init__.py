"""jaxpr: the one package that touches jaxpr internals or `jax._src`; whatever depends on JAX's version is here.

Input: jaxprs and equations. Output: jaxprs in which every variable is defined once (`normalize`), the bodies of
control-flow equations as `Region`s with explicit operands and results, source lines, equations cloned or replaced by
others, and the steps from a lowered program to JAX's C++ dispatch.

May import: nothing of autoshard.
"""

from __future__ import annotations

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var

from autoshard.jaxpr.dispatch import (
    CompileOnlyLowered,
    FastPath,
    any_tracer,
    clear_dispatcher,
    execute,
    is_tracing,
    make_dispatcher,
    trace_context,
    with_call_structure,
)
from autoshard.jaxpr.equation import (
    CONSTRAINT,
    NAMED_CALLS,
    accepts_shards,
    all_primitives,
    bind_on_shards,
    contraction_flops,
    eqn_key,
    find_primitive,
    is_interpreted,
    is_opaque,
    manual_specs,
    op_names,
    op_params,
    sharding_rule,
)
from autoshard.jaxpr.hi_primitives import CALL_HI_PRIMITIVE
from autoshard.jaxpr.nested import (
    Region,
    ScanGroups,
    eqns_with_regions,
    map_bodies,
    rebuild_scan,
    regions,
    scan_groups,
    subjaxprs,
    walk,
    with_bodies,
)
from autoshard.jaxpr.normalization import (
    normalize,
    traced_jaxpr,
)
from autoshard.jaxpr.origin import (
    autodiff_phase,
    is_backward,
    is_differentiated,
    source,
)
from autoshard.jaxpr.rewrite import (
    as_fun,
    check_jaxpr,
    clone_eqn,
    constrain_variable,
    eliminate_dead_code,
    emit,
    optimization_barrier,
    splice,
    stage_out,
    use_counts,
    with_eqns,
)
from autoshard.jaxpr.value import (
    Atom,
    aval,
    aval_bytes,
    dtype_bits,
    dtype_from_name,
    dtype_name,
    is_array,
    is_shaped,
    is_tracer,
    new_var,
    stacked_var,
)

__all__ = [
    "CALL_HI_PRIMITIVE",
    "CONSTRAINT",
    "NAMED_CALLS",
    "Atom",
    "CompileOnlyLowered",
    "FastPath",
    "Jaxpr",
    "JaxprEqn",
    "Literal",
    "Primitive",
    "Region",
    "ScanGroups",
    "Var",
    "accepts_shards",
    "all_primitives",
    "any_tracer",
    "as_fun",
    "autodiff_phase",
    "aval",
    "aval_bytes",
    "bind_on_shards",
    "check_jaxpr",
    "clear_dispatcher",
    "clone_eqn",
    "constrain_variable",
    "contraction_flops",
    "dtype_bits",
    "dtype_from_name",
    "dtype_name",
    "eliminate_dead_code",
    "emit",
    "eqn_key",
    "eqns_with_regions",
    "execute",
    "find_primitive",
    "is_array",
    "is_backward",
    "is_differentiated",
    "is_interpreted",
    "is_opaque",
    "is_shaped",
    "is_tracer",
    "is_tracing",
    "make_dispatcher",
    "manual_specs",
    "map_bodies",
    "new_var",
    "normalize",
    "op_names",
    "op_params",
    "optimization_barrier",
    "rebuild_scan",
    "regions",
    "scan_groups",
    "sharding_rule",
    "source",
    "splice",
    "stacked_var",
    "stage_out",
    "subjaxprs",
    "trace_context",
    "traced_jaxpr",
    "use_counts",
    "walk",
    "with_bodies",
    "with_call_structure",
    "with_eqns",
]
