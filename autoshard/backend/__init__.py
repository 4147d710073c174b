"""backend: from a plan to an executable, and from the executable back to figures.

In come a `Program`, its `Graph` and a `PlanRecord`. Out goes an `Executable` whose intermediates are constrained as
planned. The compiled HLO is read again: its collectives, loops and memory become an estimate in seconds and an audit of
planned against emitted collectives. Answers of the compiler are cached on disk.

May import: plan, and what it may.
"""
