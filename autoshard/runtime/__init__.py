"""runtime: the objects that a user holds, and the pipeline from a call to its executable.

Input: a function and the options of `jit`. Output: a `Step`, which plans once for each set of argument shapes and then
only calls, and its `Plan`: a `PlanRecord` with methods. `prepare` names the stages of planning; around it are the
choice of the mesh, of passes under a memory budget and of compiled layouts (`refine`), the comparison with one device
(`verify`), and NNX modules as pure functions of their state.

May import: backend, and what it may.
"""
