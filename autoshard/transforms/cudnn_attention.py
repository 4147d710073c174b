"""Attention as one cuDNN flash-attention kernel, forward and backward, for NVIDIA GPUs.

`jax.nn.dot_product_attention(implementation="cudnn")`, and its gradient from a given output and log-sum-exp. Planning
needs no cuDNN; compiling for a GPU without it is an error that says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from autoshard.errors import MeshError
from autoshard.transforms.attention_kernels import KernelCall
from autoshard.transforms.kernel_residuals import gradients_from


def cudnn_forward(query: Any, key: Any, value: Any, *, call: KernelCall) -> tuple[Any, Any]:
    """(output, log-sum-exp), as `autoshard.transforms.kernel_op.attention_kernel_p`."""
    return _with_vjp(query, key, value, call)[:2]


def cudnn_backward(
    query: Any, key: Any, value: Any, out: Any, logsumexp: Any, cotangent: Any, *, call: KernelCall
) -> tuple[Any, ...]:
    """Gradients, as `autoshard.transforms.kernel_op.attention_kernel_backward_p`."""
    return _with_vjp(query, key, value, call)[2](out, logsumexp, cotangent)


def _with_vjp(
    query: Any, key: Any, value: Any, call: KernelCall
) -> tuple[Any, Any, Callable[[Any, Any, Any], tuple[Any, ...]]]:
    """The output, the log-sum-exp of each row, and the function (output, logsumexp, cotangent) -> gradients.

    JAX returns the log-sum-exp to a caller in the output's dtype, which is too narrow, and saves it for its own
    gradient in float32: it is the one float32 residual of `jax.vjp` of shape [batch, heads, length].
    """
    cudnn = functools.partial(
        jax.nn.dot_product_attention,
        scale=call.scale,
        is_causal=call.high is not None,
        local_window_size=None if call.low is None else (-call.low, 0),
        implementation="cudnn",
    )
    try:
        out, pullback = jax.vjp(cudnn, query, key, value)
    except RuntimeError as e:
        raise MeshError(
            f"attention of {query.dtype}{list(query.shape)} is to run as a cuDNN kernel, and JAX has no cuDNN to "
            f"compile it for ({e}): pip install 'autoshard[gpu]'; or leave the pass 'attention' out of passes=[...]"
        ) from None
    batch, length, heads, _ = query.shape
    return out, *gradients_from(pullback, out, (batch, heads, length), "cuDNN attention")
