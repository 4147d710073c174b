"""cost: predicted seconds and bytes of one layout.

From a `Graph` and a `Layout` on a `LogicalMesh`: the `Cost` of a call (compute, and every collective with its bytes),
the cheapest sequence of collectives from one spec to another, live ranges, and the `Memory` at the peak. Layouts are
chosen in `autoshard.search`.

May import: ir, and what it may.
"""
