"""Restores of a changed model: what was asked for, or one error that names the leaf, both shapes and the option."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import checkpoint
from autoshard.checkpoint import pieces
from autoshard.errors import CheckpointError

MESH = Mesh(np.asarray(jax.devices(), dtype=object).reshape(4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
Arrays = Mapping[str, np.ndarray]
F = "12 4,6; b 6; head 6,2"
"""What most cases save: the leaf "12" is named by a number."""


def leaves(spec: str) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Of ``"w 8,4 bfloat16; n"`` shape and dtype by name; float32 if none is said."""
    found: dict[str, tuple[tuple[int, ...], Any]] = {}
    for leaf in filter(None, spec.split("; ")):
        name, *rest = leaf.split(" ")
        shape = tuple(int(n) for n in rest[0].split(",") if n) if rest else ()
        found[name] = shape, jnp.dtype(rest[1] if rest[1:] else "float32")
    return found


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in flat.items():
        *folders, last = name.split("/")
        at = found
        for key in folders:
            at = at.setdefault(key, {})
        at[last] = value
    return found


def numbers(spec: str, first: int = 1) -> dict[str, np.ndarray]:
    """Arrays of which no two share an element, small enough for every dtype."""
    found: dict[str, np.ndarray] = {}
    for name, (shape, dtype) in leaves(spec).items():
        size = int(np.prod(shape))
        found[name] = np.arange(first, first + size).reshape(shape).astype(dtype)
        first += size
    return found


def abstract(spec: str) -> dict[str, Any]:
    def one(shape: tuple[int, ...], dtype: Any) -> Any:
        axes = [axis if n % size == 0 else None for n, axis, size in zip(shape, "xy", (4, 2), strict=False)]
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, P(*axes)))

    return {name: one(*leaf) for name, leaf in leaves(spec).items()}


class Case(NamedTuple):
    """A model as it was saved and as it is now."""

    what: str
    saved: str
    wanted: str
    options: dict[str, Any]
    expected: Callable[[Arrays, Arrays], Mapping[str, Any]] | str
    """From the arrays that were saved and those of the fallback (`numbers` from 500 on); or the error's pattern."""


INIT = {"missing": "init", "fallback": True}
DROP = {"extra": "ignore"}
LAYERS = "h/0/w 4,6; h/1/w 4,6; h/2/w 4,6; n 3"
STACK = "h/w 3,4,6; n 3"


def same(s: Arrays, _: Arrays) -> Arrays:
    return s


def stack(s: Arrays, _: Arrays) -> Mapping[str, Any]:
    return {"h/w": np.stack([s[f"h/{i}/w"] for i in range(3)]), "n": s["n"]}


def layers(s: Arrays, _: Arrays) -> Mapping[str, Any]:
    return {"n": s["n"], **{f"h/{i}/w": s["h/w"][i] for i in range(3)}}


def grown(saved: np.ndarray, kept: np.ndarray) -> np.ndarray:
    made = kept.copy()
    made[tuple(slice(n) for n in saved.shape)] = saved
    return made


CASES = [
    # As it was
    Case("the same", F, F, {}, same),
    Case("in another order", "b 6; a 4,2", "a 4,2; b 6", {}, same),
    Case("scalars", "t; n", "n; t", {}, same),
    # Renamed
    Case("one name", F, "w 4,6; b 6; head 6,2", {"rename": {"12": "w"}},
         lambda s, f: {"w": s["12"], "b": s["b"], "head": s["head"]}),
    Case("two names swapped", "a 4; b 4", "a 4; b 4", {"rename": {"a": "b", "b": "a"}},
         lambda s, f: {"a": s["b"], "b": s["a"]}),
    Case("a glob", "enc/w 4; enc/b 2; x 1", "body/w 4; body/b 2; x 1", {"rename": {"enc/*": "body/*"}},
         lambda s, f: {"body/w": s["enc/w"], "body/b": s["enc/b"], "x": s["x"]}),
    Case("two stars", "h/0/at/w 4; h/1/at/w 4", "at/0/x/w 4; at/1/x/w 4", {"rename": {"h/*/at/*": "at/*/x/*"}},
         lambda s, f: {"at/0/x/w": s["h/0/at/w"], "at/1/x/w": s["h/1/at/w"]}),
    Case("a name before a glob", "a/w 4; a/b 2", "c 4; d/b 2", {"rename": {"a/*": "d/*", "a/w": "c"}},
         lambda s, f: {"c": s["a/w"], "d/b": s["a/b"]}),
    Case("everything moved", "w 4; b 2", "p/w 4; p/b 2", {"rename": {"*": "p/*"}},
         lambda s, f: {"p/w": s["w"], "p/b": s["b"]}),
    Case("a function", "W 4; B 2", "w 4; b 2", {"rename": str.lower}, lambda s, f: {"w": s["W"], "b": s["B"]}),
    Case("a function that leaves out", F, "12 4,6; b 6", {"rename": lambda n: None if n == "head" else n},
         lambda s, f: {"12": s["12"], "b": s["b"]}),
    Case("a function that fails", F, F, {"rename": lambda n: n[99]}, r"rename\('12'\) raises IndexError"),
    Case("a function of no name", F, F, {"rename": len}, r"rename\('12'\) gives 2: must be a name"),
    Case("an unknown name", F, F, {"rename": {"haed": "x"}}, "has this name; did you mean 'head'"),
    Case("a glob of nothing", F, F, {"rename": {"x/*": "y/*"}}, "no leaf of the checkpoint has this name"),
    Case("one name for two", F, F, {"rename": {"b": "head"}}, "rename gives b and head .* one name, head"),
    Case("more stars than before", F, F, {"rename": {"b": "*"}}, "the new one has no `\\*` that the old one has not"),
    Case("not renamed", F, "w 4,6; b 6; head 6,2", {},
         r"w \(float32\[4,6\]\) is not in the checkpoint.*rename={'12': 'w'} if that is the same leaf"),
    Case("no dict", F, F, {"rename": [("b", "c")]}, "neither a dict nor a function"),
    # Missing
    Case("missing", "b 6", "b 6; new 3", {}, r"new \(float32\[3\]\) is not in the checkpoint.*missing=\"init\""),
    Case("missing, made", "b 6", "b 6; new 4,2", INIT, lambda s, f: {"b": s["b"], "new": f["new"]}),
    Case("missing, kept", "b 6", "b 6; new 4", {"missing": "keep", "fallback": True},
         lambda s, f: {"b": s["b"], "new": f["new"]}),
    Case("nothing to make it of", "b 6", "b 6; new 3", {"missing": "init"}, "new is not in .* fallback=, a tree"),
    Case("a fallback without it", "b 6", "b 6; new 3", {"missing": "init", "fallback": {"nwe": 1}},
         "the fallback has no new, .* did you mean 'nwe'"),
    Case("a fallback of another shape", "b 6", "b 6; new 3", {"missing": "init", "fallback": {"new": np.ones(4)}},
         r"new is float64\[4\] in the fallback and float32\[3\] here"),
    Case("a fallback of another dtype", "b 6", "b 6; new 2", {"missing": "init", "fallback": {"new": np.ones(2)}},
         r"new is float64\[2\] in the fallback and float32\[2\] here"),
    Case("that, cast", "b 6", "b 6; new 2", {"missing": "init", "cast": True, "fallback": {"new": np.ones(2)}},
         lambda s, f: {"b": s["b"], "new": np.ones(2, np.float32)}),
    Case("an odd word", F, F, {"missing": "zeros"}, "missing='zeros' is none of"),
    Case("nothing saved is wanted", "a 4", "b 3", {**INIT, **DROP}, lambda s, f: {"b": f["b"]}),
    # Extra
    Case("extra", "b 6; old 3", "b 6", {}, r"old \(float32\[3\]\) is in .* not here.*extra=\"ignore\""),
    Case("extra, ignored", "b 6; old 3", "b 6", DROP, lambda s, f: {"b": s["b"]}),
    Case("ignored by name", "b 6; old 3", "b 6", {"ignore": ["old"]}, lambda s, f: {"b": s["b"]}),
    Case("ignored by glob", "b 6; opt/0/mu 3; opt/1/nu 3", "b 6", {"ignore": ["opt/*"]}, lambda s, f: {"b": s["b"]}),
    Case("another optimizer", "b 6; opt/mu/b 6; opt/nu/b 6", "b 6; opt/trace/b 6", {"ignore": ["opt/*"], **INIT},
         lambda s, f: {"b": s["b"], "opt/trace/b": f["opt/trace/b"]}),
    Case("a leaf ignored and made", F, F, {"ignore": ["head"], **INIT}, lambda s, f: {**s, "head": f["head"]}),
    Case("a leaf ignored and missing", F, F, {"ignore": ["head"]}, r"head \(float32\[6,2\]\) is not in the checkpoint"),
    Case("ignored makes room", "a 4; b 4", "b 4", {"ignore": ["b"], "rename": {"a": "b"}}, lambda s, f: {"b": s["a"]}),
    Case("text for a list", F, F, {"ignore": "head"}, "ignore='head' is not a list"),
    Case("another odd word", F, F, {"extra": "drop"}, "extra='drop' is neither"),
    # Stacked layers
    Case("layers to a stack", LAYERS, STACK, {}, stack),
    Case("a stack to layers", STACK, LAYERS, {}, layers),
    Case("numbered keys", "h_0/w 4; h_1/w 4", "h/w 2,4", {}, lambda s, f: {"h/w": np.stack([s["h_0/w"], s["h_1/w"]])}),
    Case("a stack to numbered keys", "h/w 2,4", "h1/w 4; h0/w 4", {},
         lambda s, f: {"h0/w": s["h/w"][0], "h1/w": s["h/w"][1]}),
    Case("ten layers and more", "; ".join(f"h/{i} 2" for i in range(12)), "h 12,2", {},
         lambda s, f: {"h": np.stack([s[f"h/{i}"] for i in range(12)])}),
    Case("layers of scalars", "h/0; h/1", "h 2", {}, lambda s, f: {"h": np.stack([s["h/0"], s["h/1"]])}),
    Case("a stack of scalars", "h 2", "h/0; h/1", {}, lambda s, f: {"h/0": s["h"][0], "h/1": s["h"][1]}),
    Case("two numbers in a name", "m/0/h/0 4; m/0/h/1 4", "m/0/h 2,4", {},
         lambda s, f: {"m/0/h": np.stack([s["m/0/h/0"], s["m/0/h/1"]])}),
    Case("renamed and stacked", "g/0/w 4; g/1/w 4", "h/w 2,4", {"rename": {"g/*": "h/*"}},
         lambda s, f: {"h/w": np.stack([s["g/0/w"], s["g/1/w"]])}),
    Case("stacked and cast", "h/0 4; h/1 4", "h 2,4 bfloat16", {"cast": True},
         lambda s, f: {"h": np.stack([s["h/0"], s["h/1"]]).astype(jnp.bfloat16)}),
    Case("stacked, not cast", "h/0 4; h/1 4", "h 2,4 bfloat16", {},
         r"h \(saved as h/0 and 1 more\) is float32\[2,4\] in the checkpoint and bfloat16\[2,4\] here.*cast=True"),
    Case("layers of several dtypes", "h/0 4; h/1 4 bfloat16", "h 2,4", {"cast": True},
         lambda s, f: {"h": np.stack([s["h/0"], s["h/1"].astype(np.float32)])}),
    Case("fewer layers than the stack", "h/0 4; h/1 4", "h 3,4", {},
         r"is float32\[2,4\] in the checkpoint and float32\[3,4\] here.*no option changes the number"),
    Case("a layer between is missing", "h/0 4; h/2 4", "h 3,4", {}, r"h \(float32\[3,4\]\) is not in the checkpoint"),
    Case("more layers than the stack", "h 2,4", "h/0 4; h/1 4; h/2 4", {},
         r"h/0, one of 3 layers \(saved as h\) is float32\[2,4\] in the checkpoint and float32\[3,4\] here"),
    # Dtypes
    Case("cast down", "w 4,6", "w 4,6 bfloat16", {"cast": True}, lambda s, f: {"w": s["w"].astype(jnp.bfloat16)}),
    Case("cast up", "w 4,6 bfloat16", "w 4,6", {"cast": True}, lambda s, f: {"w": s["w"].astype(np.float32)}),
    Case("integers cast", "w 4 int32", "w 4 uint8", {"cast": True}, lambda s, f: {"w": s["w"].astype(np.uint8)}),
    Case("not cast", "w 4", "w 4 float16", {}, r"w is float32\[4\] .* and float16\[4\] here.*cast=True converts"),
    Case("a number that is too large", "w 300 int32", "w 300 int8", {"cast": True}, r"w is not int8: it has \d+"),
    Case("a float that is too large", "w 70000", "w 70000 float16", {"cast": True}, "which float16 does not hold"),
    Case("another family", "w 4", "w 4 int32", {"cast": True}, r"w is float32\[4\] .* and int32\[4\] here.*leaves it"),
    # Shapes
    Case("more rows", "w 5,4", "w 8,4", INIT, lambda s, f: {"w": grown(s["w"], f["w"])}),
    Case("more columns", "w 4,5", "w 4,8", INIT, lambda s, f: {"w": grown(s["w"], f["w"])}),
    Case("more rows, zeros", "w 5,4", "w 8,4", {"missing": "init"},
         lambda s, f: {"w": np.pad(s["w"], ((0, 3), (0, 0)))}),
    Case("more rows, cast", "w 5,4", "w 8,4 bfloat16", {**INIT, "cast": True},
         lambda s, f: {"w": grown(s["w"].astype(jnp.bfloat16), f["w"])}),
    Case("rows of an empty one", "w 0,4", "w 8,4", INIT, lambda s, f: {"w": f["w"]}),
    Case("more rows, unsaid", "w 5,4", "w 8,4", {}, r"w is float32\[5,4\] .* float32\[8,4\] here.*missing=\"init\""),
    Case("fewer rows", "w 8,4", "w 5,4", {**INIT, **DROP}, r"w is float32\[8,4\] .* float32\[5,4\] here.*leaves it"),
    Case("wider and longer", "w 4,4", "w 8,8", INIT, r"w is float32\[4,4\] .* float32\[8,8\] here.*leaves it out"),
    Case("another rank", "w 4,4", "w 16", INIT, r"w is float32\[4,4\] in the checkpoint and float32\[16\] here"),
    Case("a parameter before its mean", "mu/w 8,4; params/w 8,4", "mu/w 4,4; params/w 4,4", {},
         r"state: params/w is .*\. ignore=\['params/w'\] with missing=\"init\" leaves it out and takes that of"),
    Case("renamed and of another shape", "a 4", "b 3", {"rename": {"a": "b"}}, r"b \(saved as a\) is float32\[4\]"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_a_changed_model(tmp_path: Path, case: Case) -> None:
    saved, fallback = numbers(case.saved), numbers(case.wanted, 500) if "fallback" in case.options else {}
    checkpoint.save(tmp_path, 1, nested(saved), wait=True)
    options, like = dict(case.options), abstract(case.wanted)
    if options.get("fallback") is True:
        options["fallback"] = nested(fallback)
    if isinstance(case.expected, str):
        with pytest.raises(CheckpointError, match=case.expected):
            checkpoint.restore(tmp_path, like=nested(like), **options)
        return
    state, report = checkpoint.restore(tmp_path, like=nested(like), report=True, **options)
    want = case.expected(saved, fallback)
    names = [leaf.name for leaf in report.leaves]
    assert sorted(names) == sorted(want) == sorted(like)
    for name, x in zip(names, jax.tree.leaves(state), strict=True):
        assert (x.dtype, x.shape, x.sharding) == (want[name].dtype, want[name].shape, like[name].sharding), name
        assert np.asarray(x).tobytes() == np.asarray(want[name]).tobytes(), name
    used = {name for leaf in report.leaves for name in leaf.saved} | {left.name for left in report.left_out}
    assert used == set(saved)


def test_the_table_has_sixty_cases_and_more() -> None:
    assert len({case.what for case in CASES}) == len(CASES) >= 60


def test_the_report_says_leaf_by_leaf_what_came_from_where(tmp_path: Path) -> None:
    saved = numbers("a 4; h/0 4; h/1 4; g 2,3; table 5,4; old 3; loud 2; same 2")
    checkpoint.save(tmp_path, 3, nested(saved), extra={"loader": [1, 2]})
    like = abstract("b 4 bfloat16; h 2,4; g/0 3; g/1 3; table 8,4; head 2; same 2")
    fallback = numbers("table 8,4; head 2")
    _, report = checkpoint.restore(
        tmp_path, like=nested(like), rename={"a": "b"}, cast=True, missing="init", extra="ignore", ignore=["l*"],
        fallback=nested(fallback), report=True,
    )  # fmt: skip
    assert (report.step, report.extra) == (3, {"loader": [1, 2]})
    found = {leaf.name: (leaf.origin, leaf.saved, leaf.cast_from, leaf.rows, leaf.filled) for leaf in report.leaves}
    assert found == {
        "b": ("saved", ("a",), "float32", None, ""),
        "g/0": ("unstacked", ("g",), None, None, ""),
        "g/1": ("unstacked", ("g",), None, None, ""),
        "h": ("stacked", ("h/0", "h/1"), None, None, ""),
        "head": ("new", (), None, None, ""),
        "same": ("saved", ("same",), None, None, ""),
        "table": ("grown", ("table",), None, (0, 5, 8), "fallback"),
    }
    assert [(left.name, left.why) for left in report.left_out] == [("loud", "ignored"), ("old", "extra")]
    assert str(report).splitlines() == [
        "1 of 7 leaves as they were saved",
        "b bfloat16[4]: saved as a, cast from float32",
        "g/0 float32[3]: a layer of g",
        "g/1 float32[3]: a layer of g",
        "h float32[2,4]: 2 layers, h/0 and on",
        "head float32[2]: of the fallback",
        "table float32[8,4], dimension 0 from 5 to 8 with fallback",
        "loud: left out, ignored",
        "old: left out, extra",
    ]


def test_keep_without_a_fallback_keeps_what_like_has(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"w": jnp.ones(3)})
    like = {"w": jnp.zeros(3), "n": 7, "key": jax.random.key(4), "host": np.arange(2), "grown": np.arange(3.0)}
    back = checkpoint.restore(tmp_path, like=like, missing="keep")
    assert back["w"].tolist() == [1, 1, 1]
    assert (back["n"], back["host"].tolist()) == (7, [0, 1])
    assert jax.random.key_data(back["key"]).tolist() == [0, 4]
    checkpoint.save(tmp_path, 2, {"grown": np.full(2, 8.0)})
    assert checkpoint.restore(tmp_path, like=like, missing="keep")["grown"].tolist() == [8, 8, 2]
    with pytest.raises(CheckpointError, match="host is not in the checkpoint, nor are 3 more of 5 leaves"):
        checkpoint.restore(tmp_path, like=like, missing="init")


def train(state: Any, x: Any) -> Any:
    def loss(p: Any) -> Any:
        return ((jnp.take(p["table"], x, 0) @ p["w"]) ** 2).mean()

    updates, opt = optax.adam(1e-2).update(jax.grad(loss)(state["params"]), state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}


def initial(rows: int) -> Any:
    params = {"table": jax.random.normal(jax.random.key(rows), (rows, 15)), "w": jnp.eye(15)}
    return {"params": params, "opt": optax.adam(1e-2).init(params)}


@pytest.mark.parametrize("pad_state", [False, True])
def test_a_vocabulary_grows_under_a_plan(tmp_path: Path, pad_state: bool) -> None:
    """The function that makes the state is run by the plan; Adam's moments grow with the table."""
    x = jnp.arange(16) % 7
    step = autoshard.jit(train, mesh={"data": 8}, strategy="fsdp", pad_state=pad_state)
    plan = step.plan(initial(21), x)
    checkpoint.save(tmp_path, 1, train(initial(16), x))
    options: dict[str, Any] = {"missing": "init", "fallback": lambda: initial(21)}
    state, report = checkpoint.restore(tmp_path, plan=plan, report=True, **options)
    assert {leaf.name for leaf in report.leaves if leaf.rows == (0, 16, 21)} == {
        "params/table", "opt/0/mu/table", "opt/0/nu/table",
    }  # fmt: skip
    after, fresh = train(initial(16), x), initial(21)
    np.testing.assert_array_equal(state["params"]["table"][:16], after["params"]["table"])
    np.testing.assert_array_equal(state["params"]["table"][16:], fresh["params"]["table"][16:])
    np.testing.assert_array_equal(state["opt"][0].mu["table"][:16], after["opt"][0].mu["table"])
    assert isinstance(state["params"]["table"], autoshard.PaddedArray) == pad_state
    np.testing.assert_allclose(
        step(state, x)["params"]["table"], train(state, x)["params"]["table"], rtol=1e-5, atol=1e-6
    )
    with pytest.raises(CheckpointError, match='missing="init" restores it and fills what it has more'):
        checkpoint.restore(tmp_path, plan=plan)


def test_a_module_gets_a_head(tmp_path: Path) -> None:
    def make() -> nnx.Module:
        return nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(1))])

    def update(model: Any, x: Any) -> Any:
        for layer in model:
            x = layer(x)
        return x.sum()

    plan = autoshard.jit(update, mesh={"data": 8}).plan(make(), jnp.ones((8, 8)))
    saved = nnx.state(nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(2))]))
    checkpoint.save(tmp_path, 1, saved)
    model = make()
    nnx.update(model, checkpoint.restore(tmp_path, plan=plan, missing="init", fallback=make))
    np.testing.assert_array_equal(model[0].kernel[...], nnx.Linear(8, 8, rngs=nnx.Rngs(2)).kernel[...])
    np.testing.assert_array_equal(model[1].kernel[...], nnx.Linear(8, 8, rngs=nnx.Rngs(1)).kernel[...])


def test_a_layer_of_a_stack_reads_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is read nothing is more than a shard of one leaf, and of a leaf that is cast no more than its shards."""
    stack = numbers("h 4,64,64")
    checkpoint.save(tmp_path, 1, {"h": stack["h"]})
    made: list[int] = []

    def watched(shape: Any, dtype: Any, *, zero: bool) -> np.ndarray:
        made.append(int(np.prod(shape)) * dtype.itemsize)
        return empty(shape, dtype, zero=zero)

    empty = pieces._aligned_empty
    monkeypatch.setattr(pieces, "_aligned_empty", watched)
    back = checkpoint.restore(tmp_path, like=nested(abstract("h/0 64,64; h/1 64,64; h/2 64,64; h/3 64,64")))
    np.testing.assert_array_equal(np.stack(jax.tree.leaves(back)), stack["h"])
    assert set(made) == {64 * 64 * 4 // 8}
    assert len(made) == 4 * 8


MESHES = [(8, 1), (4, 2), (2, 4), (1, 1)]


def over(shape: tuple[int, int]) -> dict[str, NamedSharding]:
    devices = np.asarray(jax.devices()[: shape[0] * shape[1]], dtype=object).reshape(shape)
    mesh = Mesh(devices, ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    return {
        "w": NamedSharding(mesh, P("x", "y")),
        "b": NamedSharding(mesh, P(("y", "x"))),
        "n": NamedSharding(mesh, P()),
    }


def save_safetensors(path: Path, state: Any) -> None:
    checkpoint.to_safetensors(path, state, max_bytes=300)


def save_orbax(path: Path, state: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)


def save_ours(path: Path, state: Any) -> None:
    checkpoint.save(path, 1, state, wait=True)


@pytest.mark.parametrize("write", [save_ours, save_orbax, save_safetensors])
@pytest.mark.parametrize("first", MESHES)
def test_every_mesh_to_every_other_bit_for_bit(tmp_path: Path, write: Any, first: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    state = {"w": random.random((16, 8), np.float32), "b": random.random(16).astype(jnp.bfloat16), "n": np.int32(5)}
    write(tmp_path / "saved", jax.device_put(state, over(first)))
    read = checkpoint.from_safetensors if write is save_safetensors else checkpoint.restore
    for second in MESHES:
        goal = over(second)
        like = {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=goal[k]) for k, x in state.items()}
        back = read(tmp_path / "saved", like=like)
        assert {k: x.sharding for k, x in back.items()} == goal
        assert {k: np.asarray(x).tobytes() for k, x in back.items()} == {k: x.tobytes() for k, x in state.items()}
