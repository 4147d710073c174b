"""runtime: what a user holds.

In come a function and the options of `jit`. Out goes a `Step`, which plans on first sight of a set of shapes and then
only calls, and its `Plan`: a `PlanRecord` with the operations on it. `prepare` names the stages from arguments to
executable; around it stand the choice of the mesh, of passes under a memory budget and of compiled layouts (`refine`),
the comparison with one device (`verify`), and NNX modules as pure state.

May import: backend, and what it may.
"""
