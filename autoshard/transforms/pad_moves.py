"""moved: slices, padding, splits and concatenations of uneven sizes, as views and as arrays laid over one another."""

from __future__ import annotations

from typing import Any

from jax import lax

from autoshard import jaxpr as jx
from autoshard.transforms.pad_state import Body
from autoshard.transforms.window import View, Window, filled, padded, sliced

PIECES = 4
"""Most operands of a concatenation that are laid over one another."""


def viewed(body: Body, eqn: jx.JaxprEqn) -> bool:
    """Makes views of the results, where they are such."""
    x, *rest = eqn.invars
    view, p = body.view(x), eqn.params
    if eqn.primitive.name == "pad":
        if any(between for _, _, between in p["padding_config"]):
            return spread(body, eqn)
        edges = [(int(before), int(after)) for before, after, _ in p["padding_config"]]
        found = [padded(view, edges, body.exact(rest[0]))]
    elif eqn.primitive.name == "split":
        offsets = [sum(p["sizes"][:i]) for i in range(len(p["sizes"]))]
        found = [
            sliced(view, [at if d == p["axis"] else 0 for d in range(len(view.shape))], jx.aval(v).shape)
            for at, v in zip(offsets, eqn.outvars, strict=True)
        ]
    elif p["strides"] is None or set(p["strides"]) == {1}:
        found = [sliced(view, p["start_indices"], jx.aval(eqn.outvars[0]).shape)]
    else:
        return strided(body, eqn, view)
    views = [v for v in found if v is not None]
    if len(views) < len(found):
        return False
    body.see(eqn, views)
    body.pending.update(eqn.outvars)
    return True


def strided(body: Body, eqn: jx.JaxprEqn, view: View) -> bool:
    """Elements that lie apart: a window on those of the whole base that lie as far apart."""
    starts, strides = eqn.params["start_indices"], eqn.params["strides"]
    sizes, around = jx.aval(eqn.outvars[0]).shape, view.around
    begins = [w.at + start if s > 1 else 0 for w, start, s in zip(view.windows, starts, strides, strict=True)]
    fits = all(b >= 0 and n % s == 0 for b, n, s in zip(begins, around, strides, strict=True))
    kept = [n // s for n, s in zip(around, strides, strict=True)]
    uneven = any(s > 1 and body.uneven(m, n) for s, m, n in zip(strides, sizes, kept, strict=True))
    if not fits or filled(view) or not (uneven or eqn.invars[0] in body.views):
        return False
    first = [b % s for b, s in zip(begins, strides, strict=True)]
    (base,) = body.emitted(lambda x: lax.slice(x, first, x.shape, strides), eqn, view.base)
    windows = [
        Window(b // s if s > 1 else w.at + start, m, 0, n)
        for w, start, b, s, m, n in zip(view.windows, starts, begins, strides, sizes, kept, strict=True)
    ]
    body.see(eqn, [View(base, tuple(windows))])
    return True


def spread(body: Body, eqn: jx.JaxprEqn) -> bool:
    """Padding between elements: of an operand that is padded at its ends first, until it divides as the result does."""
    edges, view = eqn.params["padding_config"], body.view(eqn.invars[0])
    sizes, result = view.shape, jx.aval(eqn.outvars[0]).shape
    steps = [int(between) + 1 for _, _, between in edges]
    kept = [n // s for n, s in zip(result, steps, strict=True)]
    before = [int(low) // s for (low, _, _), s in zip(edges, steps, strict=True)]
    after = [n - b - m if s > 1 else int(high)
             for n, b, m, s, (_, high, _) in zip(kept, before, sizes, steps, edges, strict=True)]  # fmt: skip
    fits = all(s == 1 or (n % s == 0 and b >= 0 <= a)
               for n, b, a, s in zip(result, before, after, steps, strict=True))  # fmt: skip
    uneven = any(s > 1 and body.uneven(m, n) for m, n, s in zip(sizes, kept, steps, strict=True))
    fill = body.exact(eqn.invars[1])
    whole = padded(view, list(zip(before, after, strict=True)), fill) if fits and uneven else None
    if whole is None:
        return False
    inner = [(int(low) % s, s - 1 - int(low) % s, s - 1) if s > 1 else (0, 0, 0)
             for (low, _, _), s in zip(edges, steps, strict=True)]  # fmt: skip
    x = body.place(whole, [(0, n) for n in whole.shape], eqn)
    body.become(eqn, lambda x, fill: lax.pad(x, fill, inner), [x, fill], [result])
    return True


def tiled(body: Body, eqn: jx.JaxprEqn) -> bool:
    """Repeats one dimension at a time."""
    reps = eqn.params["reps"]
    spread = [d for d, (n, r) in enumerate(zip(jx.aval(eqn.invars[0]).shape, reps, strict=True)) if n > 1 < r]
    if body.mesh.size == 1 or len(spread) < 2:
        return False

    def fun(x: Any) -> Any:
        for d in sorted(range(x.ndim), key=lambda d: -x.shape[d]):  # the dimension that is split before x is larger
            x = lax.tile(x, [r if e == d else 1 for e, r in enumerate(reps)]) if reps[d] != 1 else x
        return x

    body.become(eqn, fun, [body.exact(eqn.invars[0])], [jx.aval(eqn.outvars[0]).shape])
    return True


def laid(body: Body, eqn: jx.JaxprEqn) -> bool:
    """A concatenation: its operands laid over one another, each at its place in an array of the whole size."""
    axis, (result,) = eqn.params["dimension"], eqn.outvars
    views, shape = [body.view(a) for a in eqn.invars], jx.aval(result).shape
    bases = [v.base for v in views if v.shape != v.around]
    parted = any(body.uneven(v.shape[axis], v.around[axis]) for v in views)
    if len(views) > PIECES or not (parted or len(set(bases)) < len(bases)):
        return False
    size = body.length(shape[axis], max(v.around[axis] for v in views))
    if size is None:
        return False
    lengths = [max(body.length(n, v.around[d]) or n for v in views) for d, n in enumerate(shape)]
    begin, pieces, begins = 0, list[jx.Atom](), list[int]()
    for v in views:
        places = [(begin, size) if d == axis else (0, n) for d, n in enumerate(lengths)]
        pieces.append(body.place(v, places, eqn))
        begins.append(begin)
        begin += v.shape[axis]

    def over(x: Any, *others: Any) -> Any:
        for at, y in zip(begins[1:], others, strict=True):
            x = lax.select(lax.broadcasted_iota("int32", x.shape, axis) >= at, y, x)
        return x

    body.become(eqn, over, pieces, [shape])
    return True
