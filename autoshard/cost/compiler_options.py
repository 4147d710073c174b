"""Compiler options of a plan: those that it sets for its target, and those that it may pass on from a file.

The first six are for TPU, three of them where memory is tight. Measured in benchmarks/results/options.md.

*Fused all-gathers.* XLA fuses the asynchronous all-gather of a weight into the convolution before it. That hides the
all-gather, but such a convolution cannot be overwritten by its elementwise consumer, which then needs a buffer of its
own: the plan disables the fusion.

*Rematerialization.* Before it assigns buffers, XLA recomputes what it can until its estimate of the peak is at most a
share of the memory, and it takes what is near: products of the layers. A plan has decided already what is recomputed,
so that it fits: it raises that share.

*Scheduling in all of the memory.* XLA starts collectives early as far as the arrays that then live longer fit into a
share of the memory; past that it starts no more early, and each is waited for. Where its count may come to that, the
plan raises this share too. XLA counts what is in the host's memory as the device's there: the plan adds its share.

*Collectives on SparseCores.* Where a chip has them, they can gather and scatter while the TensorCore computes. By
default XLA has the TensorCore do it, which computes nothing meanwhile.

*On-chip memory of a fusion.* What a product reads and writes passes through on-chip memory in blocks. By default XLA
lets one fusion have less of it than large products on a v6e need to keep the matrix units busy.

*All-to-alls beside products.* Experts whose rows are exchanged send them in parts, one beside the products of another
(`autoshard.transforms.grouped_rows`). By default XLA for TPU has every all-to-all waited for; for slices of v5e of more
than 16 chips it compiles no other (`Hardware.async_all_to_all_up_to`), and plans ask for none there.

*All-reduces combined.* Experts whose rows are exchanged give the gradients of all their weights at once. XLA for GPU
combines no all-reduces above 30 MiB: it starts these one after the other, with nothing between, and waits for each.
There the plan raises that size.

*All-reduces a layer later.* Gradients of a loop's layers are reduced at the end of an iteration, where little is left
to compute beside them. XLA for GPU scatters such sums in the next iteration by default, beside all of it; the plan asks
for the same where it all-reduces them.

*A stream within nodes.* Between nodes of GPUs collectives take other links than within them. By default XLA has all in
one stream, and one under way at a time. Where all-to-alls go over one kind of link and others over another, as in
mixtures of experts, the plan has XLA give those within a node a stream of their own, which it can since JAX 0.12.

*Copies by regions.* The slots of a pipeline's residuals pass through the conditional of a tick, which reads one or
writes one. XLA for CPU proves that they need no copy only if it looks into the branches, and by default it does not:
it copies all slots at every tick.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax

from autoshard.cost.overlap.host_copies import copied_beside_products
from autoshard.ir.graph import Graph
from autoshard.machine.collective import ALL_REDUCE, ALL_TO_ALL, Collective
from autoshard.machine.mesh import LogicalMesh

CompilerOptions = tuple[tuple[str, Any], ...]

NO_ALL_GATHER_FUSION = {"xla_tpu_enable_async_collective_fusion_fuse_all_gather": False}
"""The option that disables the fusion."""
LATE_REMATERIALIZATION = {"xla_jf_rematerialization_percent_shared_memory_limit": 99}
"""The option that raises the share of memory, in percent, above which XLA recomputes."""
SCHEDULER_LIMIT = "xla_tpu_scheduler_percent_shared_memory_limit"
"""The option that says above which share of the memory, in percent, XLA starts no collective early: by its own count
while it schedules, which is higher than what the program takes."""
MORE_MEMORY, STEP_OF_LIMIT = 115, 10
"""The least share that plans set, and the multiple of what they add to it."""
SPARSE_CORE_COLLECTIVES = {
    f"xla_tpu_enable_sparse_core_collective_offload_{kind}": True
    for kind in (
        "2d_all_gather",
        "3d_all_gather",
        "all_gather",
        "all_reduce",
        "nd_reduce_scatter",
        "reduce_scatter",
    )
}
"""The options that give collectives over one and more dimensions of the torus to the SparseCores."""
SCOPED_VMEM = "xla_tpu_scoped_vmem_limit_kib"
"""The option that says how much on-chip memory one fusion may use."""
ASYNC_ALL_TO_ALL = {"xla_tpu_enable_async_all_to_all": True}
"""The option that lets all-to-alls run beside what does not wait for them."""
ALL_REDUCES_COMBINED = {"xla_gpu_all_reduce_combine_threshold_bytes": 2**28}
"""The option that raises the bytes up to which all-reduces become one."""
LATE_ALL_REDUCES = {"xla_gpu_pipeline_all_reduce": "COLLECTIVE_PIPELINING_MODE_ON"}
"""The option that has a loop reduce what an iteration has made in the next one."""
STREAM_WITHIN_NODES = {"xla_gpu_collective_domain_assignment": "scale_up_fabric"}
"""The option that gives collectives within a node a stream, beside which one between nodes may be under way."""
_NAMED_SINCE = (0, 12)
"""JAX whose XLA has these two options."""
COPIES_BY_REGIONS = {"xla_cpu_copy_insertion_use_region_analysis": True}
"""The option that has XLA for CPU look into branches before it copies what passes through them."""
OWN_OPTIONS = frozenset(
    pair
    for options in (
        NO_ALL_GATHER_FUSION,
        LATE_REMATERIALIZATION,
        SPARSE_CORE_COLLECTIVES,
        ASYNC_ALL_TO_ALL,
        ALL_REDUCES_COMBINED,
        LATE_ALL_REDUCES,
        STREAM_WITHIN_NODES,
        COPIES_BY_REGIONS,
    )
    for pair in options.items()
) | {(SCHEDULER_LIMIT, percent) for percent in range(MORE_MEMORY, 100 * MORE_MEMORY, STEP_OF_LIMIT)}
"""Names and values."""
PEAK_MARGIN = 1.16
"""Largest measured ratio of reported to predicted peak memory of a program with fused all-gathers, 1.15; and where more
than its inverse of the memory is predicted to be used, XLA may come to recompute: of a decoder of 70B on v5e:16x16,
planned into 0.866 of it, a product of each layer, 2 % of the step."""
SCHEDULED_MORE = 1.3
"""Multiple of the predicted peak to which XLA's count may come while it schedules: decoders whose layers are unrolled
took so much compiled, as rings keep what they read."""
HARMLESS = frozenset(
    {
        "memory_fitting_level",
        "optimization_level",
        "xla_allow_excess_precision",
        "xla_backend_optimization_level",
        "xla_cpu_enable_concurrency_optimized_scheduler",
        "xla_cpu_enable_fast_math",
        "xla_cpu_enable_fast_min_max",
        "xla_cpu_fast_math_honor_division",
        "xla_cpu_fast_math_honor_functions",
        "xla_cpu_fast_math_honor_infs",
        "xla_cpu_fast_math_honor_nans",
        "xla_enable_async_all_gather",
        "xla_enable_async_all_reduce",
        "xla_enable_async_collective_permute",
        "xla_gpu_all_gather_combine_threshold_bytes",
        "xla_gpu_all_reduce_combine_threshold_bytes",
        "xla_gpu_autotune_level",
        "xla_gpu_deterministic_ops",
        "xla_gpu_enable_command_buffer",
        "xla_gpu_enable_latency_hiding_scheduler",
        "xla_gpu_enable_pipelined_all_gather",
        "xla_gpu_enable_pipelined_all_reduce",
        "xla_gpu_enable_pipelined_reduce_scatter",
        "xla_gpu_enable_triton_gemm",
        "xla_gpu_enable_while_loop_double_buffering",
        "xla_gpu_exclude_nondeterministic_ops",
        "xla_gpu_memory_limit_slop_factor",
        "xla_gpu_pipeline_all_gather",
        "xla_gpu_pipeline_all_reduce",
        "xla_gpu_pipeline_reduce_scatter",
        "xla_gpu_reduce_scatter_combine_threshold_bytes",
        "xla_jf_rematerialization_percent_shared_memory_limit",
        "xla_jf_spmd_threshold_for_windowed_einsum_mib",
        "xla_llvm_disable_expensive_passes",
        "xla_tpu_data_parallel_opt_different_sized_ops",
        "xla_tpu_enable_ag_backward_pipelining",
        "xla_tpu_enable_all_experimental_scheduler_features",
        "xla_tpu_enable_async_collective_fusion",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
        "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter",
        "xla_tpu_enable_async_collective_fusion_multiple_steps",
        "xla_tpu_enable_collective_pipeliner",
        "xla_tpu_enable_data_parallel_all_reduce_opt",
        "xla_tpu_enable_latency_hiding_scheduler",
        "xla_tpu_overlap_compute_collective_tc",
        SCHEDULER_LIMIT,
        *ASYNC_ALL_TO_ALL,
        SCOPED_VMEM,
        *SPARSE_CORE_COLLECTIVES,
        *STREAM_WITHIN_NODES,
        *COPIES_BY_REGIONS,
    }
)
"""Options that decide how a program is compiled and nothing else. XLA has others that write or read files that they
name, load code, or carry further options; a plan, which may be a file from anywhere, does not set those by itself."""


def should_disable_all_gather_fusion(graph: Graph, peak: float, budget: float, given: CompilerOptions = ()) -> bool:
    """Whether a plan disables the fusion: on TPU, for a program with convolutions that may not fit otherwise.

    Args:
      graph: the program.
      peak: predicted peak with the fusion, in bytes per device.
      budget: memory budget, in bytes per device.
      given: the user's compiler options; where they enable the fusion, it stays.
    """
    if peak * PEAK_MARGIN <= budget or graph.program.mesh.platform != "tpu" or conflicting_options(given):
        return False
    return any(n.kind.traits.convolution for n in graph.nodes)


def conflicting_options(given: CompilerOptions) -> dict[str, Any]:
    """The options in ``given`` that contradict the one that the prediction of memory depends on."""
    return {name: x for name, x in given if NO_ALL_GATHER_FUSION.get(name, x) != x}


def effective_options(
    graph: Graph,
    peak: float,
    collectives: Sequence[Collective],
    disable_fusion: bool,
    given: CompilerOptions = (),
    host: float = 0.0,
) -> CompilerOptions:
    """The options that the program is compiled with, sorted: ``given`` override the plan's own.

    Args:
      graph: the program, with its target.
      peak: predicted peak, in bytes per device.
      collectives: those of a call.
      disable_fusion: what `should_disable_all_gather_fusion` says.
      given: the user's compiler options.
      host: bytes in the host's memory, for each device.
    """
    mesh = graph.program.mesh
    on_tpu, memory = mesh.platform == "tpu", mesh.hardware.memory
    waits_on_host = host if copied_beside_products(graph) else 0.0
    sparse_cores = on_tpu and mesh.size > 1 and mesh.hardware.sparse_core_collectives
    own = dict[str, Any](NO_ALL_GATHER_FUSION if disable_fusion else {})
    own |= LATE_REMATERIALIZATION if on_tpu and peak * PEAK_MARGIN > memory else {}
    fills = on_tpu and peak * SCHEDULED_MORE > memory
    own |= {SCHEDULER_LIMIT: _scheduler_limit(waits_on_host, mesh)} if fills or waits_on_host else {}
    own |= SPARSE_CORE_COLLECTIVES if sparse_cores else {}
    own |= _scoped_vmem(mesh)
    if _exchanges_rows(graph):
        beside = ASYNC_ALL_TO_ALL if mesh.size <= mesh.hardware.async_all_to_all_up_to else {}
        own |= {"tpu": beside, "gpu": ALL_REDUCES_COMBINED}.get(mesh.platform, {})
    named_so = mesh.platform == "gpu" and jax.__version_info__ >= _NAMED_SINCE
    if named_so and _take_two_kinds_of_links(collectives, mesh):
        own |= STREAM_WITHIN_NODES
    if named_so and any(c.kind == ALL_REDUCE and c.count > 1 for c in collectives):
        own |= LATE_ALL_REDUCES
    return tuple(sorted({**own, **dict(given)}.items()))


def pipeline_options(options: CompilerOptions, mesh: LogicalMesh) -> CompilerOptions:
    """``options`` with those that a pipeline over ``mesh`` is compiled with as well."""
    own = COPIES_BY_REGIONS if mesh.platform == "cpu" else {}
    return tuple(sorted({**own, **dict(options)}.items()))


def _exchanges_rows(graph: Graph) -> bool:
    return any(n.kind.rule.local is not None and n.kind.rule.local.alongside for n in graph.nodes)


def _take_two_kinds_of_links(collectives: Sequence[Collective], mesh: LogicalMesh) -> bool:
    """Whether there are all-to-alls on one kind of link, and others on another."""
    exchanges = {mesh.slowest_link(c.axes) for c in collectives if c.axes and c.kind == ALL_TO_ALL}
    others = {mesh.slowest_link(c.axes) for c in collectives if c.axes and c.kind != ALL_TO_ALL}
    return any(a != b for a in exchanges for b in others)


def _scheduler_limit(host: float, mesh: LogicalMesh) -> int:
    return MORE_MEMORY + STEP_OF_LIMIT * math.ceil(100 * host / mesh.hardware.memory / STEP_OF_LIMIT)


def _scoped_vmem(mesh: LogicalMesh) -> dict[str, Any]:
    size = mesh.hardware.scoped_vmem if mesh.platform == "tpu" else 0
    return {SCOPED_VMEM: size // 1024} if size else {}


def user_options(options: CompilerOptions, mesh: LogicalMesh) -> CompilerOptions:
    """``options`` of a plan for ``mesh`` without those that `effective_options` added."""
    own = OWN_OPTIONS | _scoped_vmem(mesh).items()
    return tuple(pair for pair in options if pair not in own)


def other_options(options: CompilerOptions, given: CompilerOptions) -> dict[str, Any]:
    """The options of a plan that are not `HARMLESS` and that the user has not ``given`` as well."""
    names = HARMLESS | dict(given).keys()
    return {name: x for name, x in options if name not in names}
