"""Training steps sharded by hand, as a good engineer writes them today.

Names of dimensions go to mesh axes by a table. Every mesh here has the axes ``data`` and ``model``. A name that a table
lacks is not split; neither is a dimension that its axes do not divide, as key-value heads fewer than devices, and an
axis splits one dimension of an array alone.

Beside its table a step by hand has what autoshard's plans have: attention by the chip's kernel, a loss over an eighth
of the positions at a time, one of five policies for what is recomputed, by MaxText's names, and the compiler options
of MaxText's scripts for the chip.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.machine.mesh import Hardware
from autoshard.transforms.attention_kernels import KernelCall
from autoshard.transforms.kernel_op import attention_kernel_backward_p, attention_kernel_p
from benchmarks.maxtext_steps import GATHERS, OVERLAP, REDUCTIONS
from benchmarks.zoo import Marks, Model, Named, is_named

type Table = Mapping[str, tuple[str, ...]]

_ALL = ("data", "model")
_TENSOR: Table = dict.fromkeys(("expert", "heads", "mlp", "vocab"), ("model",))
_SPLIT: Table = {"batch": ("data",), **_TENSOR}


@dataclass(frozen=True)
class Baseline:
    """Tables for parameters and activations; the optimizer's moments are sharded as their parameters."""

    says: str
    params: Table = field(default_factory=dict)
    acts: Table = field(default_factory=dict)


BASELINES: Mapping[str, Baseline] = {
    "dp": Baseline("parameters everywhere, the batch over all devices", {}, {"batch": _ALL}),
    "fsdp": Baseline("model width of parameters and the batch over all devices", {"embed": _ALL}, {"batch": _ALL}),
    "tp": Baseline("Megatron: heads, MLPs, vocabulary, experts over `model`", _TENSOR, _SPLIT),
    "fsdp_tp": Baseline("MaxText: both, with its constraints on activations", {"embed": ("data",), **_TENSOR}, _SPLIT),
}  # fmt: skip

_PROJECTIONS = ("query", "key", "value")
POLICIES: Mapping[str, tuple[str, ...] | None] = {
    "": None,
    "minimal_with_context": (*_PROJECTIONS, "context", "out", "up", "gate", "down"),
    "save_dot_with_context_except_mlp": (*_PROJECTIONS, "context", "out"),
    "save_qkv_proj": _PROJECTIONS,
    "save_out_proj": ("out",),
    "full": (),
}
"""What each block saves, from the most to the least."""

LOSS_CHUNKS = 8
OPTIONS: Mapping[str, str] = {
    "tpu-v5e": f"{GATHERS} {REDUCTIONS}",
    "tpu-v5p": f"{OVERLAP} {REDUCTIONS} xla_tpu_megacore_fusion_allow_ags=false "
    "xla_enable_async_collective_permute=true xla_tpu_enable_ag_backward_pipelining=true",
    "h100": "xla_gpu_enable_latency_hiding_scheduler=True",
}
"""Of the compiler, by chip."""


def spec(shape: Sequence[int], names: Sequence[str | None], table: Table, sizes: Mapping[str, int]) -> PartitionSpec:
    """The sharding of an array by ``table`` on a mesh of such axis sizes."""
    used: set[str] = set()
    entries: list[tuple[str, ...]] = []
    for size, name in zip(shape, names, strict=False):
        axes = tuple(a for a in table.get(name or "", ()) if a not in used)
        if size % math.prod(sizes[a] for a in axes):
            axes = ()
        used.update(axes)
        entries.append(axes)
    return PartitionSpec(*(axes or None for axes in entries))


def lowered(
    model: Model,
    baseline: Baseline,
    mesh: Mesh,
    hardware: Hardware | None = None,
    *,
    saved: tuple[str, ...] | None = None,
    donate: bool = True,
) -> jax.stages.Lowered:
    """A training step as ``baseline`` shards it.

    Args:
      hardware: the chips, of which its kernel and its options are; None: neither.
      saved: of `POLICIES`.
    """
    placement = _Placement(mesh, baseline.acts, hardware.attention.kernel if hardware and hardware.attention else "")
    state, batch = placement.of(model.state, baseline.params), placement.of(model.batch, baseline.acts)
    kernel = placement.attention if placement.kernel else None
    marks = Marks(placement.constraint, kernel, placement.loss, saved)
    whole = NamedSharding(mesh, PartitionSpec())
    jitted = jax.jit(
        model.step(marks),
        in_shardings=(state, batch),
        out_shardings=(state, whole),
        donate_argnums=(0,) if donate else (),
        compiler_options=options(hardware) if hardware else None,
    )
    return jitted.lower(*abstract(model))


def options(hardware: Hardware) -> dict[str, str]:
    """Compiler options for the chip."""
    return dict(option.split("=") for option in OPTIONS.get(hardware.name, "").split())


@dataclass(frozen=True)
class _Placement:
    """What is written into a model for a table of its activations."""

    mesh: Mesh
    table: Table
    kernel: str

    def spec(self, x: Any, *names: str | None) -> PartitionSpec:
        return spec(x.shape, names, self.table, dict(self.mesh.shape))

    def of(self, tree: Any, table: Table) -> Any:
        """Shardings of `Named` leaves."""
        sizes = dict(self.mesh.shape)
        return jax.tree.map(
            lambda x: NamedSharding(self.mesh, spec(x.shape, x.names, table, sizes)), tree, is_leaf=is_named
        )

    def constraint(self, x: jax.Array, *names: str | None) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, self.spec(x, *names)))

    def attention(self, query: jax.Array, key: jax.Array, value: jax.Array, causal: bool) -> jax.Array:
        """By the kernel, on the rows and heads of each device."""
        call = KernelCall(self.kernel, query.shape[-1] ** -0.5, high=0 if causal else None)
        specs = [self.spec(x, "batch", None, "heads", None) for x in (query, key, value)]
        attend = jax.shard_map(
            functools.partial(_attention, call),
            mesh=self.mesh,
            in_specs=tuple(specs),
            out_specs=specs[0],
            check_vma=False,
        )
        return attend(query, key, value)

    def loss(self, x: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
        """Mean cross-entropy, a part of the positions at a time; weights are gathered, and their gradient summed, once.

        Args:
          x: [B, S, D].
          head: [D, V].
          targets: int [B, S].
        """
        rows, columns = self.spec(x, "batch", None, None), self.spec(head, None, "vocab")
        data, model = (tuple(_axes(entry)) for entry in (rows[0], columns[1]))

        @jax.checkpoint
        def part(given: tuple[jax.Array, jax.Array], head: jax.Array) -> jax.Array:
            logits = jnp.einsum("bsd,dv->bsv", given[0], head, preferred_element_type=jnp.float32)
            top = jax.lax.stop_gradient(logits).max(-1)
            top = jax.lax.pmax(top, model) if model else top
            own = given[1] - head.shape[1] * (jax.lax.axis_index(model) if model else 0)
            label = jnp.take_along_axis(logits, own[..., None] % head.shape[1], axis=-1)[..., 0]
            label = jnp.where((own >= 0) & (own < head.shape[1]), label, 0)
            total = jnp.exp(logits - top[..., None]).sum(-1)
            total, label = jax.lax.psum((total, label), model) if model else (total, label)
            return (jnp.log(total) + top - label).sum()

        def local(x: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
            parts = [jnp.moveaxis(a.reshape(a.shape[0], LOSS_CHUNKS, -1, *a.shape[2:]), 1, 0) for a in (x, targets)]
            total = jax.lax.map(functools.partial(part, head=head), tuple(parts)).sum()
            return jax.lax.psum(total, data) if data else total

        specs = (rows, columns, PartitionSpec(rows[0], None))
        total = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=PartitionSpec())(x, head, targets)
        return total / targets.size


def _axes(entry: Any) -> tuple[str, ...]:
    """The axes of one dimension of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call: KernelCall, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return attention_kernel_p.bind(query, key, value, call=call)[0]


def _attention_forward(call: KernelCall, *operands: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    out, logsumexp = (checkpoint_name(x, "context") for x in attention_kernel_p.bind(*operands, call=call))
    return out, (*operands, out, logsumexp)


def _attention_backward(call: KernelCall, residuals: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[Any, ...]:
    return tuple(attention_kernel_backward_p.bind(*residuals, cotangent, call=call))


_attention.defvjp(_attention_forward, _attention_backward)


def abstract(model: Model) -> tuple[Any, Any]:
    """The shapes of a model's state and batch."""

    def shapes(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.abstract if isinstance(x, Named) else x, tree, is_leaf=is_named)

    return shapes(model.state), shapes(model.batch)
