"""hlo: reads the HLO text of compiled programs.

In: the text that XLA for CPU, GPU or TPU prints of a compiled program. Out: its computations, the trip counts of its
loops, its collectives with their mesh axes, and the seconds of its instructions by a chip's roofline.

May import: jaxpr, machine, transforms.
"""
