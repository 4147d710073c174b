"""layer_loops: layers that a step computes one after the other, each with arrays of its own, as loops over layers.

In: a jaxpr. Out: the same function, in which blocks of equations that repeat, each on what the one before left, are
scans over stacked operands, the forward's and the backward's (`roll_layers`). Arguments and results stay.

May import: jaxpr, errors.
"""
