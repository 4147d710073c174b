"""Traits: what the engine has to know of an operation beside its sharding rule, as data.

The table by primitive is `autoshard.rules.traits`. A program hands it to the engine (`Program.rules`), and every node
of a graph has the traits of its operation (`OpKind.traits`), so that no module of the engine names an operation.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traits:
    """Facts about one operation. A field left at its default claims nothing: only what the rule says is known."""

    fused_into_consumer: bool = False
    """XLA computes it where it is read, for nothing: broadcasts, casts, reshapes, transposes. Asked by
    `cost.node_strategy` (no compute time), `cost.liveness` (no buffer), `cost.fusions` (moves nothing),
    `passes.sum_products` (rounds nothing), `plan.planner` (what is held for the backward part is what it is computed
    from) and `transforms.held_values` (it has its operand's name)."""
    view: bool = False
    """Its result is its first operand in another order, shape or dtype, so that XLA finds a reshard of one to be the
    reshard of the other. Asked by `cost.cost` and `cost.profile_step` (one reshard serves both),
    `search.value_groups` (a parameter in another order), `plan.planner` and `transforms.held_values` (its name is its
    operand's)."""
    broadcasts: bool = False
    """It broadcasts its operand, or positions, to its result, whose size can be chosen. Asked by `cost.cost` (that of
    a scalar is recomputed at each use), `passes.pad_uneven` (it is computed at the padded size) and
    `transforms.batch_parts` (it is computed for a part)."""
    moves_data: bool = False
    """It takes elements of its operands to other positions and computes nothing; XLA fuses it into what reads it. Asked
    by `cost.liveness` (no buffer), `cost.profile_step` and `cost.fusions` (part of what reads it), `ir.dim_classes`
    (rows of a parameter are of one), `passes.sum_products` (rounds nothing) and `transforms.held_values` (it has its
    operand's name)."""
    in_place_operand: int | None = None
    """The operand whose buffer takes the result where nothing else reads it. Asked by `cost.liveness`, `cost.fusions`
    (it moves what it writes) and `ir.build_graph` (what is written into what leaves leaves too)."""
    gathers: bool = False
    """It takes slices of operand 0 at the positions in operand 1. Asked by `ir.build_graph` (tied to its gradient),
    `cost.liveness` (where one element of each row is taken, XLA compares positions and fuses what it reads),
    `plan.constraints` and `backend.islands` (in a pipeline it runs on shards)."""
    scatters: bool = False
    """It writes operand 2 into operand 0 at the positions in operand 1. Asked by `cost.liveness` (where one element of
    each row is written, XLA compares positions and fuses it), `plan.constraints` and `backend.islands` (in a pipeline
    it runs on shards)."""
    scatter_adds: bool = False
    """It adds operand 2 to operand 0 at the positions in operand 1, as the gradient of a gather does. Asked by
    `ir.build_graph` (tied to what is gathered from) and `transforms.batch_parts` (its result is a sum over parts)."""
    reduces: bool = False
    """It reduces dimensions, and XLA fuses what its operands are computed from into it. Asked by `cost.liveness`,
    `cost.fusions` (it reads buffers anew), `backend.rings` (a product's result, with the product) and
    `transforms.batch_parts` (a sum over chunks)."""
    convolution: bool = False
    """XLA for TPU may fuse the all-gather of an operand into it. Asked by `cost.compiler_options`, and
    `transforms.batch_parts` (the gradient of a kernel is a sum over the batch)."""
    identity: bool = False
    """Its i-th result is its i-th operand. Asked by `ir.build_graph` (each pair on its own) and
    `transforms.held_values` (each has its operand's name)."""
    constrains: bool = False
    """It states how its operand is to be sharded. Asked by `ir.build_graph` (a pin), `passes.pad_uneven`,
    `transforms.batch_parts` and `backend.lower` (the plan's own takes its place), `pipelining.chain`, and
    `cost.overlap.weights_and_gradients`."""
    loop: bool = False
    """It runs its body again and again; values are carried from one iteration to the next. Asked by `cost.liveness`."""
    barrier: bool = False
    """XLA computes its operands before it and fuses nothing across it. Asked by `cost.liveness`."""
    adds: bool = False
    """Its result is the sum of its operands. Asked by `ir.combined_reductions`, `transforms.per_part_sums`,
    `transforms.batch_parts`, `pipelining.chain` and `passes.sum_products`."""
    grouped_product: bool = False
    """It multiplies each group of rows of operand 0 with a matrix, or sums products over each group; operand 2 has the
    sizes of the groups. Asked by `passes.experts`, and by `cost.node_strategy`: the work that its rule states is that
    without a kernel (`Hardware.grouped_products`)."""
    stretches: bool = False
    """Elementwise, with the same parameters on operands of any shape; it stretches their dimensions of size 1. Asked by
    `plan.constraints` (it runs on shards where the same operand is stretched to other splits elsewhere) and
    `pipelining.segment` (which stretches an operand as the result is split), and by `passes.norms` (which runs it in a
    shape without groups)."""
    any_size: bool = False
    """It runs as it is on any size of a dimension that its rule calls parallel, once the parameter that states the
    shape of its result follows. Asked by `passes.experts`, which runs it on some of the rows."""
    casts: bool = False
    """Its result is its operand in another dtype. Asked by `ir.combined_reductions`, `transforms.per_part_sums`,
    `transforms.batch_parts`, `cost.profile_step`, `pipelining.chain`, `passes.attention`, `passes.experts`,
    `passes.norms`, `plan.planner`, `transforms.held_values`, `ir.dim_classes` and
    `cost.overlap.weights_and_gradients`."""
    linear: tuple[tuple[int, ...], ...] = ()
    """Sets of operands in which, all others fixed, it is linear. Asked by `transforms.per_part_sums`,
    `passes.sum_products` and `passes.experts.picks`, which carry sums over parts through it, and by `pipelining`, sums
    over stages; what no gradient goes through on its way to a sum need not say so."""
    linear_in_inexact: bool = False
    """`linear` is true of floating-point and complex numbers alone: integers are truncated or wrap. Asked by
    `transforms.per_part_sums` and `pipelining.chain`."""
    folds_scalars: bool = False
    """Of scalars that are known while a program is read, it is evaluated then. Asked by `passes.attention`."""
    keeps_constant: bool = False
    """Of an operand that is one number everywhere, its result is so too. Asked by `transforms.per_part_sums`,
    `transforms.batch_parts`, `passes.attention` and `passes.experts`."""
    runs_once: bool = False
    """Run again, it may give other values, or calls the host again. Asked by `transforms.batch_parts` and
    `transforms.remat`, which never recomputes it."""
    ignores_neutral: bool = False
    """It reads nothing of a reduced dimension but its elements, so that neutral ones more change nothing. Asked by
    `passes.pad_uneven`, which makes padding neutral, and `transforms.batch_parts`."""
    iterates_to_convergence: bool = False
    """It runs until every element has converged, which an arbitrary one may never do. Asked by `passes.pad_uneven`,
    which does not pad its operands."""
    position_dependent: bool = False
    """Its elements depend on their positions in the whole array, or are arbitrary. Asked by `transforms.batch_parts`
    and `rules.validation`, which runs it on parts."""
    unchecked_shapes: bool = False
    """Its kernel writes out of bounds where the shapes of its operands do not match. Asked by `rules.validation`, which
    tries shapes."""
    shape_param: str | None = None
    """The parameter that states the shape of its result. Asked by `passes.pad_uneven`, `transforms.batch_parts`,
    `passes.sum_products` and `passes.experts`."""
    mispartitioned_by_xla: bool = False
    """XLA (JAX 0.12) gives wrong numbers or fails where it partitions it by itself. Asked by `plan.constraints`, which
    constrains all that it reads and makes."""
    row_major_on_cpu: bool = False
    """XLA for CPU (JAX 0.12) may give it operands in a memory layout that it then refuses. Asked by `backend.lower`,
    which constrains the layout."""


UNKNOWN = Traits()
"""Of an operation of which nothing is known but its rule."""
