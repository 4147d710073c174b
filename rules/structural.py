"""Operations that contain programs, or state a sharding: the engine treats them by their structure, not by a rule."""

from __future__ import annotations

STRUCTURAL: dict[str, str] = {
    "call_hi_primitive": "it stands for many operations, such as SearchSorted; the body of each is partitioned",
    "cond": "the branches agree",
    "custom_jvp_call": "its body is partitioned",
    "custom_linear_solve": "its body is partitioned",
    "custom_vjp_call": "its body is partitioned",
    "eval_jaxpr": "inlined",
    "jit": "inlined",
    "remat2": "its body is partitioned",
    "scan": "the body is partitioned, the carry alike each turn",
    "shard_map": "partitioned by its user",
    "sharding_constraint": "a pin",
    "while": "condition and body are partitioned, the carry alike each turn",
}
