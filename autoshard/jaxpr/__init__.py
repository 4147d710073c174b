"""The one package that touches jaxpr internals or `jax._src`; what depends on the JAX version sits here.

It offers a jaxpr as the rest of autoshard wants it: every variable defined once in the whole tree
(`normalize`), nested programs as `Region`s with their wiring stated, source lines, and rewriting by
replacing equations.
"""

from __future__ import annotations

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var

from autoshard.jaxpr.equation import (
    CONSTRAINT,
    NAMED,
    SIDE_BY_SIDE,
    all_primitives,
    contraction_flops,
    interpreted,
    manual_specs,
    names,
    on_part,
    opaque,
    primitive,
    replayable,
    resizable,
    sharding_rule,
    signature,
)
from autoshard.jaxpr.nested import (
    INLINED,
    Region,
    Scan,
    Wire,
    regions,
    scan,
    subjaxprs,
    with_bodies,
    with_scan,
)
from autoshard.jaxpr.normal import (
    normalize,
    program,
)
from autoshard.jaxpr.origin import (
    backward,
    differentiated,
    source,
)
from autoshard.jaxpr.rewrite import (
    again,
    as_fun,
    barrier,
    check,
    constrain,
    dead_code,
    splice,
    with_code,
)
from autoshard.jaxpr.stages import (
    kept_arguments,
)
from autoshard.jaxpr.value import (
    Atom,
    aval,
    aval_bytes,
    dtype_bits,
    dtype_name,
    dtype_named,
    fresh,
    is_array,
    is_shaped,
    is_tracer,
    lift,
    typeof,
)

__all__ = [
    "CONSTRAINT",
    "INLINED",
    "NAMED",
    "SIDE_BY_SIDE",
    "Atom",
    "Jaxpr",
    "JaxprEqn",
    "Literal",
    "Primitive",
    "Region",
    "Scan",
    "Var",
    "Wire",
    "again",
    "all_primitives",
    "as_fun",
    "aval",
    "aval_bytes",
    "backward",
    "barrier",
    "check",
    "constrain",
    "contraction_flops",
    "dead_code",
    "differentiated",
    "dtype_bits",
    "dtype_name",
    "dtype_named",
    "fresh",
    "interpreted",
    "is_array",
    "is_shaped",
    "is_tracer",
    "kept_arguments",
    "lift",
    "manual_specs",
    "names",
    "normalize",
    "on_part",
    "opaque",
    "primitive",
    "program",
    "regions",
    "replayable",
    "resizable",
    "scan",
    "sharding_rule",
    "signature",
    "source",
    "splice",
    "subjaxprs",
    "typeof",
    "with_bodies",
    "with_code",
    "with_scan",
]
