"""cost: seconds and bytes of one layout.

In come a `Graph` and a `Layout` on a `LogicalMesh`. Out go the `Cost` of a call (compute, and every collective with its
bytes), the cheapest sequence of collectives from one spec to another, live ranges, and the `Memory` at the peak. Nothing
here chooses; `autoshard.search` does.

May import: ir, and what it may.
"""
