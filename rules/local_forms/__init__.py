"""local_forms: how one device computes its part of an operation that XLA would gather for.

In come the mesh axes that split the operation, and one device's shards of its operands; out go its shards of the
results. Collectives are explicit. The rules name these functions; a plan runs them as `jax.shard_map` islands.

May import: transforms, cost, and what they may; of rules nothing but this package.
"""
