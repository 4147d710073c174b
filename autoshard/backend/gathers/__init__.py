"""gathers: when a lowered step gathers what a plan has it gather.

In: a jaxpr with a plan's sharding constraints. Out: the same with constraints in other places: ahead of a loop's
iterations, before a kernel is reversed.

May import: jaxpr.
"""
