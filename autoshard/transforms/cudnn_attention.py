"""fused: attention as one kernel of a GPU's own library, cuDNN, so that its scores never reach memory.

Two operations over queries [batch, length, heads, width] and keys and values [batch, length, key heads, width]. For an
NVIDIA GPU they become what `jax.nn.dot_product_attention` makes of cuDNN's flash attention, and elsewhere the plain
composition of `autoshard.transforms.attention_op`. Where the library is missing, compiling says so; planning does not need it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax import numpy as jnp
from jax.interpreters import mlir

from autoshard.errors import MeshError
from autoshard.transforms.attention_op import (
    AttentionConfig,
    ScoreOp,
    attend,
    block_gradients,
    finalize_gradients,
    out_dot_cotangent,
)
from autoshard.transforms.primitive import define_primitive

MAX_HEAD_WIDTH = 128
"""The widest head that cuDNN takes on every GPU, forward and backward. Narrower heads count as if they were as wide:
on an H100 they run at 0.65 to 0.8 of the rate (FlashAttention-3, arXiv:2407.08608, figure 5: 64 beside 128)."""
MEASURED_KEYS = 1024
"""Keys of the measurements that a hardware table's shares are of."""
STARTUP_KEYS = 341
"""Keys whose work beginning and ending a kernel is worth: on an H100 it runs at 0.32 of the peak for 512 keys, at 0.4
for 1,024 (the same figure, with a causal mask)."""
NEGLIGIBLE_SCORE = -1e6
"""A masked score above this might still count; cuDNN leaves masked keys out."""
DTYPES = ("bfloat16", "float16")


def unsupported_reason(form: AttentionConfig, query: Any, key: Any, value: Any) -> str:
    """Why the library does not take an attention; empty where it does."""
    dtypes = {str(x.dtype) for x in (query, key, value)}
    sizes = form.sizes(query, key, value)
    width, fill = sizes[form.head_width], causal_fill(form)
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        return f"cuDNN takes queries, keys and values of {' or '.join(DTYPES)}, not {', '.join(sorted(dtypes))}"
    if other := next((s.kind for s in form.score_ops if s.kind not in {"scale", "band"}), ""):
        return f"cuDNN gets no mask or bias but the causal mask ({other})"
    if fill is not None and [(s.low, s.high) for s in form.score_ops if s.kind == "band"] != [(None, 0)]:
        return "cuDNN gets no mask or bias but the causal mask (a window)"
    if fill is not None and fill > NEGLIGIBLE_SCORE:
        return f"cuDNN leaves masked keys out, and these count by a score of {fill:g}"
    if fill is not None and sizes[form.query_position] != sizes[form.key_position]:
        return f"its causal mask is of {sizes[form.query_position]} queries and {sizes[form.key_position]} keys, cuDNN's of as many of both"
    if set(form.query_dims) != {*form.row_dims, form.head_width} or set(form.key_dims) ^ set(form.value_dims) != {
        form.head_width,
        form.value_width,
    }:
        return "cuDNN takes keys and values of the same heads, and no more of them than of queries"
    if form.out_dtype not in dtypes:  # cotangents may be asked wider: what they are of is not, nor are they in the end
        return f"cuDNN's result is {dtypes.pop()}, as its operands, not {form.out_dtype}"
    if width % 8 or width > MAX_HEAD_WIDTH or sizes[form.value_width] != width:
        return f"cuDNN takes heads that are a multiple of 8 and at most {MAX_HEAD_WIDTH} wide, not {width}"
    return ""


def causal_fill(form: AttentionConfig) -> float | None:
    """The score of what the causal mask leaves out, of forms of scales and bands alone; None without a mask."""
    score = None
    for step in form.score_ops:
        score = step.constant if step.kind == "band" else score and score * step.constant
    return score


def kernel_flops_at_peak(
    form: AttentionConfig, query: Any, key: Any, value: Any, share: float, *, backward: bool = False
) -> float:
    """What the peak does while the kernel runs, at its ``share`` of the peak."""
    sizes, flops = form.sizes(query, key, value), form.flops(query, key, value, backward=backward)
    return flops_at_peak(
        flops, sizes[form.head_width], peak_share(share, sizes[form.key_position]), causal=causal_fill(form) is not None
    )


def flops_at_peak(flops: float, width: int, share: float, *, causal: bool) -> float:
    """What the peak does while the kernel does ``flops``, half of them where a causal mask leaves out the rest."""
    return flops * max(1.0, MAX_HEAD_WIDTH / width) / share / (2 if causal else 1)


def peak_share(share: float, keys: int) -> float:
    """The share of the peak for so many keys, where it is ``share`` for `MEASURED`."""
    return share * (1 + STARTUP_KEYS / MEASURED_KEYS) / (1 + STARTUP_KEYS / keys)


def _form(query: Any, key: Any, scale: float, causal: bool) -> AttentionConfig:
    """The form of the operations here, with the queries' heads apart that share a key head."""
    dtype = str(query.dtype)
    steps = (ScoreOp("scale", scale), *([ScoreOp("band", -math.inf, high=0)] if causal else []))
    return AttentionConfig(
        "bqhgd", "bkhd", "bkhe", "bqhge", "bhgq", "q", "k", steps, (), "float32", "float32", dtype, dtype,
        cotangent_dims="bqhge", grad_dims=("bqhgd", "bkhd", "bkhe"), grad_dtypes=(dtype, str(key.dtype), str(key.dtype)),
    )  # fmt: skip


def _apart(x: Any, key: Any) -> Any:
    return x.reshape(*x.shape[:2], key.shape[2], -1, x.shape[3])


def _plain(query: Any, key: Any, value: Any, *, scale: float, causal: bool) -> tuple[Any, Any]:
    out, peak, total = attend(_apart(query, key), key, value, form=_form(query, key, scale, causal))
    return out.reshape(query.shape), (peak + jnp.log(total)).reshape(_rows(query))


def _plain_backward(
    query: Any, key: Any, value: Any, out: Any, logsum: Any, cotangent: Any, *, scale: float, causal: bool
) -> tuple[Any, Any, Any]:
    form = _form(query, key, scale, causal)
    q, o, ct = (_apart(x, key) for x in (query, out, cotangent))
    peak = logsum.reshape(logsum.shape[0], key.shape[2], -1, logsum.shape[2])
    inner = out_dot_cotangent(form, o, ct)
    dq, dk, dv = finalize_gradients(
        form, block_gradients(form, q, key, value, peak, jnp.ones_like(peak), ct, inner, ())
    )
    return dq.reshape(query.shape), dk, dv


def _library(
    query: Any, key: Any, value: Any, *, scale: float, causal: bool
) -> tuple[Any, Any, Callable[..., tuple[Any, ...]]]:
    """What came out, the logarithms of the sums, and ``gradients(out, logsum, cotangent)``.

    JAX gives the logarithms to a caller in the dtype of what came out, which has too few bits, and to its own gradient
    in float32: among what `jax.vjp` holds they are the one array in it that lies as [batch, heads, length].
    """
    cudnn = functools.partial(jax.nn.dot_product_attention, scale=scale, is_causal=causal, implementation="cudnn")
    try:
        out, pull = jax.vjp(cudnn, query, key, value)
    except RuntimeError as e:
        raise MeshError(
            f"attention of {query.dtype}{list(query.shape)} is to run as cuDNN's, and JAX has no cuDNN to compile it "
            f"for ({e}): pip install 'autoshard[gpu]'; or leave the pass 'attention' out of passes=[...]"
        ) from None
    held, tree = jax.tree.flatten(pull)
    sums = [i for i, x in enumerate(held) if (x.shape, str(x.dtype)) == (_rows(query), "float32")]
    mixed = [i for i, x in enumerate(held) if x is out]
    if len(sums) != 1 or len(mixed) != 1:
        raise MeshError(
            f"attention of {query.dtype}{list(query.shape)}: JAX {jax.__version__} keeps other values for the gradient "
            "of cuDNN's attention than autoshard knows; leave the pass 'attention' out of passes=[...]"
        )

    def gradients(given: Any, logsum: Any, cotangent: Any) -> tuple[Any, ...]:
        found = list(held)
        found[mixed[0]], found[sums[0]] = given, logsum
        return jax.tree.unflatten(tree, found)(cotangent)

    return out, held[sums[0]], gradients


def _cudnn(query: Any, key: Any, value: Any, *, scale: float, causal: bool) -> tuple[Any, Any]:
    return _library(query, key, value, scale=scale, causal=causal)[:2]


def _cudnn_backward(
    query: Any, key: Any, value: Any, out: Any, logsum: Any, cotangent: Any, *, scale: float, causal: bool
) -> tuple[Any, ...]:
    return _library(query, key, value, scale=scale, causal=causal)[2](out, logsum, cotangent)


def _rows(query: Any) -> tuple[int, int, int]:
    batch, length, heads, _ = query.shape
    return batch, heads, length


def _shapes(query: Any, key: Any, value: Any, **_: Any) -> tuple[Any, Any]:
    return query, query.update(shape=_rows(query), dtype=jnp.dtype("float32"), weak_type=False)


def _backward_shapes(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[Any, Any, Any]:
    return query, key, value


attention_kernel_p = define_primitive("attention_kernel", _plain, _shapes)
"""(query, key, value) -> (what comes out, the logarithm of each row's sum of exponentials [batch, heads, length])."""
attention_kernel_backward_p = define_primitive("attention_kernel_backward", _plain_backward, _backward_shapes)
"""(query, key, value, what came out, logarithms, cotangent) -> cotangents of query, key and value. The second and
third may be those over more keys than these, whose part the result then is."""
for _p, _fun in ((attention_kernel_p, _cudnn), (attention_kernel_backward_p, _cudnn_backward)):
    mlir.register_lowering(_p, mlir.lower_fun(_fun, multiple_results=True), platform="cuda")
