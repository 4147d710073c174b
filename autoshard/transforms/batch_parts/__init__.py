"""batch_parts: which equations of a step compute the batch, and how they compute one part of it.

In come a jaxpr and a cut of each argument that has the batch; out comes a `BatchRegion`: the equations that run once
for each part, what they read, and what leaves them, each value with how those of all parts combine. `BatchRegion.run`
computes one part. A pass runs the parts in a loop, a pipeline in the ticks of its schedule.

May import: ir, and what it may; of transforms nothing but this package.
"""
