"""backend: lowers and compiles a plan, and analyses the compiled HLO.

Input: a `Program`, its `Graph` and a `PlanRecord`. Output: an `Executable` whose intermediates are constrained as
planned. The HLO of the compiled step is parsed: its collectives, loops and memory give an estimated step time and an
audit of planned against emitted collectives. Results of compilations are cached on disk.

May import: plan, and what it may.
"""
