"""Operations without a rule that the engine knows: they contain other programs, or state a sharding."""

from __future__ import annotations

STRUCTURAL: dict[str, str] = {
    "call_hi_primitive": "a call of a HiPrim, such as SearchSorted, whose body is partitioned",
    "cond": "its branches are partitioned, with the same specs for their results",
    "custom_jvp_call": "its body is partitioned",
    "custom_linear_solve": "its body is partitioned",
    "custom_vjp_call": "its body is partitioned",
    "eval_jaxpr": "it is inlined",
    "jit": "it is inlined",
    "remat2": "its body is partitioned",
    "scan": "its body is partitioned, with the same carry specs in every iteration",
    "shard_map": "it is partitioned by the user",
    "sharding_constraint": "a sharding that the user states",
    "while": "its condition and body are partitioned, with the same carry specs in every iteration",
}
