"""rings: collectives that a lowered step runs beside products: as permutes along a ring of devices, each beside part of
one, and scatters in turn.

In: a `Graph`, a `PlanRecord`, and the jaxpr that is lowered. Out: which products and kernels have a ring, which are
lowered together, and what they do on shards.

May import: plan, and what it may; autoshard.backend.on_shards.
"""
