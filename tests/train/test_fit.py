"""fit: equal to a loop by hand on one device, on any mesh, stopped and resumed anywhere."""

from __future__ import annotations

import csv
import itertools
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import checkpoint
from autoshard.errors import ArgumentError, CheckpointError, ConfigError
from autoshard.runs.curves import runs_in
from autoshard.train import Padding, Rows, even_buckets, fit

chosen = np.random.default_rng(0)
DATA = {"x": chosen.normal(size=(50, 8)).astype(np.float32), "y": chosen.integers(0, 4, 50).astype(np.int32)}
OPTIMIZER = optax.adam(1e-2)


class LinenNet(linen.Module):
    """Two layers with a norm."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(4)(linen.LayerNorm()(jnp.tanh(linen.Dense(16)(x))))


class NnxNet(nnx.Module):
    """Two layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.first, self.second = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.second(jnp.tanh(self.first(x)))


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def linen_state() -> Any:
    params = LinenNet().init(jax.random.key(0), DATA["x"][:1])
    return {"params": params, "opt": OPTIMIZER.init(params), "key": jax.random.key(1)}


def linen_step(state: Any, batch: Mapping[str, Any]) -> Any:
    loss, grads = jax.value_and_grad(lambda p: cross_entropy(LinenNet().apply(p, batch["x"]), batch["y"]))(
        state["params"]
    )
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt, "key": state["key"]}, {"loss": loss, "norm": optax.tree.norm(grads)}


def nnx_state() -> Any:
    model = NnxNet(nnx.Rngs(0))
    return {"model": model, "optimizer": nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)}


def nnx_step(state: Any, batch: Mapping[str, Any]) -> Any:
    loss, grads = nnx.value_and_grad(lambda model: cross_entropy(model(batch["x"]), batch["y"]))(state["model"])
    state["optimizer"].update(state["model"], grads)
    return loss


def plain_step(state: Any, batch: Mapping[str, Any]) -> Any:
    """Logistic regression that returns the next state alone."""
    return state - 0.1 * jax.grad(lambda w: cross_entropy(batch["x"] @ w, batch["y"]))(state)


KINDS: Mapping[str, tuple[Any, Any]] = {
    "linen": (linen_state, linen_step),
    "nnx": (nnx_state, nnx_step),
    "plain": (lambda: jnp.zeros((8, 4)), plain_step),
}


def leaves(state: Any) -> list[np.ndarray]:
    values = jax.tree.leaves(nnx.state(state) if isinstance(state, dict) and "model" in state else state)
    return [
        np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in values
    ]


def by_hand(kind: str, steps: int) -> tuple[list[np.ndarray], list[float]]:
    """The state and the losses after the steps under plain `jax.jit` on one device."""
    make, step = KINDS[kind]
    state, batches, losses = make(), Rows(DATA, 8, seed=5), []
    jitted = (nnx.jit if kind == "nnx" else jax.jit)(step)
    for _ in range(steps):
        result = jitted(state, jax.tree.map(np.asarray, next(batches), is_leaf=lambda x: hasattr(x, "shape")))
        if kind == "linen":
            state, metrics = result
            losses.append(float(metrics["loss"]))
        elif kind == "nnx":
            losses.append(float(result))
        else:
            state = result
    return leaves(state), losses


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_that_by_hand_stopped_and_resumed_on_another_mesh(kind: str, tmp_path: Path):
    make, step = KINDS[kind]
    wanted, losses = by_hand(kind, 9)
    seen: dict[int, float] = {}

    def log(number: int, metrics: Mapping[str, float]) -> None:
        seen.update({number: metrics["loss"]} if "loss" in metrics else {})

    for mesh, steps in (({"data": 4, "model": 2}, 4), ({"data": 2}, 9)):
        donated = None if kind == "nnx" else 0
        planned = autoshard.jit(step, mesh=mesh, donate_argnums=donated)
        found = fit(planned, make(), Rows(DATA, 8, seed=5), steps=steps, checkpoints=tmp_path, every=3, log=log)
    assert checkpoint.steps(tmp_path) == (6, 9)
    np.testing.assert_allclose([seen[n] for n in sorted(seen)], losses, rtol=1e-5)
    for one, other in zip(leaves(found), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_modules_are_updated_in_place(tmp_path: Path):
    state = nnx_state()
    before = np.array(state["model"].first.kernel[...])
    assert fit(nnx_step, state, Rows(DATA, 8), steps=2, checkpoints=tmp_path) is state
    trained = np.array(state["model"].first.kernel[...])
    assert not np.array_equal(before, trained)
    again = nnx_state()
    fit(nnx_step, again, Rows(DATA, 8), steps=2, checkpoints=tmp_path)  # finished: restored, and no step taken
    np.testing.assert_array_equal(again["model"].first.kernel[...], trained)


def count(state: Any, batch: Any) -> Any:
    """Sums every row of a data set of numbered rows into a histogram."""
    return state.at[batch["row"]].add(1), {"loss": state.sum()}


@pytest.mark.parametrize("kind", ["rows", "grain", "generator"])
def test_no_sample_is_lost_or_repeated(kind: str, tmp_path: Path):
    def batches() -> Any:
        if kind == "rows":
            return Rows({"row": np.arange(24)}, 4, seed=0)
        if kind == "grain":
            rows = grain.MapDataset.range(24).shuffle(seed=0).map(lambda n: {"row": n, "name": str(n)}).repeat()
            return rows.batch(4).to_iter_dataset()
        shuffled = np.random.default_rng(0).permutation(24)
        return ({"row": shuffled[n : n + 4], "name": ["a"] * 4} for n in range(0, 24, 4))

    for mesh, steps in ((8, 2), (2, 3), (4, 6)):
        step = autoshard.jit(count, mesh={"data": mesh}, donate_argnums=0)
        state = fit(step, jnp.zeros(24, jnp.int32), batches(), steps=steps, checkpoints=tmp_path)
        assert int(state.sum()) == 4 * steps
    np.testing.assert_array_equal(state, np.ones(24))


def test_names_beside_the_arrays_pass_by():
    """As an array of a data set, or a list in each batch, of which the last is smaller."""
    step = autoshard.jit(count, mesh={"data": 4}, donate_argnums=0)
    rows = {"row": np.arange(24), "name": np.arange(24).astype(str)}
    state = fit(step, jnp.zeros(24, jnp.int32), Rows(rows, 4), steps=6)
    np.testing.assert_array_equal(state, np.ones(24))
    batches = [{"row": np.arange(n), "name": ["a"] * n} for n in (8, 3)]
    pad = Padding([{"rows": 8}], {"row": ["rows"]}, {"row": 23})
    state = fit(step, jnp.zeros(24, jnp.int32), batches, steps=2, pad=pad)
    np.testing.assert_array_equal(state[:9], [2] * 3 + [1] * 5 + [0])


def test_arrays_take_the_batch_size_of_the_plan():
    step = autoshard.jit(count, mesh={"data": 4}, donate_argnums=0)
    plan = step.plan(jnp.zeros(24, jnp.int32), {"row": jax.ShapeDtypeStruct((6,), jnp.int32)})
    state = fit(step, jnp.zeros(24, jnp.int32), {"row": np.arange(24)}, steps=4, plan=plan)
    np.testing.assert_array_equal(state, np.ones(24))
    undecorated = fit(count, jnp.zeros(24, jnp.int32), {"row": np.arange(24)}, steps=4, plan=plan)
    assert undecorated.sharding.mesh.shape == {"data": 4}


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_saves_the_step_that_is_being_taken(number: signal.Signals, ends: Any, tmp_path: Path):
    before = signal.getsignal(number)

    def log(step: int, _: Mapping[str, float]) -> None:
        if step == 3:
            os.kill(os.getpid(), number)

    try:
        with pytest.raises(ends) as raised:
            fit(
                count, jnp.zeros(24, jnp.int32), Rows({"row": np.arange(24)}, 4), steps=6, checkpoints=tmp_path, log=log
            )
    finally:
        signal.signal(number, before)
    assert number is signal.SIGINT or raised.value.code == 143
    assert checkpoint.latest(tmp_path) in (3, 4, 5)
    state = fit(count, jnp.zeros(24, jnp.int32), Rows({"row": np.arange(24)}, 4), steps=6, checkpoints=tmp_path)
    np.testing.assert_array_equal(state, np.ones(24))


def test_a_signal_before_the_first_step_ends_it_at_once(tmp_path: Path):
    before = signal.getsignal(signal.SIGTERM)

    def batches() -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        yield {"row": np.arange(4)}

    try:
        with pytest.raises(SystemExit, match="143"):
            fit(count, jnp.zeros(24, jnp.int32), batches(), steps=1, checkpoints=tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert checkpoint.latest(tmp_path) is None


def test_one_folder_for_the_log_and_the_checkpoints(tmp_path: Path):
    """A run has it while each of its steps is written there."""
    fit(count, jnp.zeros(24, jnp.int32), Rows({"row": np.arange(24)}, 4), steps=2, checkpoints=tmp_path, log=tmp_path)
    assert checkpoint.latest(tmp_path) == 2
    assert (tmp_path / "log.jsonl").exists()


def test_a_folder_gets_events_and_a_table(tmp_path: Path):
    def evaluate(state: Any) -> Any:
        return {"accuracy": state.sum() / 24}

    for steps in (3, 5):
        data = Rows({"row": np.arange(24)}, 4)
        options: dict[str, Any] = {"checkpoints": tmp_path / "c", "every": 2, "evaluate": evaluate}
        fit(count, jnp.zeros(24, jnp.int32), data, steps=steps, log=tmp_path / "log", **options)
    events = [json.loads(line) for line in (tmp_path / "log/log.jsonl").read_text().splitlines()]
    assert [(e["event"], e["step"]) for e in events if e["event"] == "step"] == [("step", n) for n in range(1, 6)]
    assert [e["accuracy"] for e in events if e["event"] == "held_out"] == pytest.approx(
        [8 / 24, 12 / 24, 16 / 24, 20 / 24]
    )
    with (tmp_path / "log/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["loss"] for row in rows if row["loss"]] == ["0.0", "4.0", "8.0", "12.0", "16.0"]
    assert [row["step"] for row in rows if row["eval_accuracy"]] == ["2", "3", "4", "5"]


def test_a_folder_says_how_the_run_ended_and_that_its_mesh_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def run(mesh: int, steps: int, rows: int = 24) -> str:
        step = autoshard.jit(count, mesh={"data": mesh}, donate_argnums=0)
        given = itertools.islice(Rows({"row": np.arange(24)}, 4), rows // 4)
        fit(step, jnp.zeros(24, jnp.int32), given, steps=steps, checkpoints=tmp_path / "c", log=tmp_path / "log")
        (listed,) = runs_in(epath.Path(tmp_path))
        return listed.state

    assert run(4, 2) == "finished"
    assert "the mesh was" not in capsys.readouterr().out
    with pytest.raises(ArgumentError, match="ended after step 3"):
        run(4, 6, rows=12)
    assert [listed.state for listed in runs_in(epath.Path(tmp_path))] == ["failed"]
    assert run(2, 4) == "finished"
    assert "the mesh was (data=4) of cpu until step 3, and is (data=2) of cpu: the state" in capsys.readouterr().out
    assert run(2, 4) == "finished"  # restored, and no step taken


def test_a_loss_that_stays_nan_is_said_in_the_end():
    def train(losses: list[float]) -> None:
        batches = [{"loss": np.float32(loss)} for loss in losses]
        fit(lambda state, batch: (state + 1, batch["loss"]), jnp.zeros(()), batches, steps=len(losses))

    with pytest.warns(UserWarning, match=r'since step 4, .*: with nan="stop", "skip" or "rewind N" it would') as warned:
        train([np.nan, np.inf, 1.0, np.nan, np.inf])
    assert len(warned) == 1
    train([np.nan, 1.0])  # no longer


def test_what_cannot_be_trained_is_refused(tmp_path: Path):
    start, rows = jnp.zeros(24, jnp.int32), {"row": np.arange(24)}
    with pytest.raises(ArgumentError, match="steps=0"):
        fit(count, start, Rows(rows, 4), steps=0)
    with pytest.raises(ArgumentError, match="batches: there is none"):
        fit(count, start, [], steps=1)
    with pytest.raises(ArgumentError, match="it must return the next state"):
        fit(lambda state, batch: (batch, state, 1), start, Rows(rows, 4), steps=1)
    with pytest.raises(ArgumentError, match=r"is \[4\], and a batch has \[2\]"):
        fit(count, jnp.zeros(24, jnp.int32), [{"row": np.arange(4)}, {"row": np.arange(2)}], steps=2)
    with pytest.raises(ArgumentError, match="is int32, and a batch has float32"):
        fit(count, start, [{"row": np.arange(4)}, {"row": np.zeros(4, np.float32)}], steps=2)
    fit(count, jnp.zeros(24, jnp.int32), Rows(rows, 4), steps=2, checkpoints=tmp_path)
    with pytest.raises(CheckpointError, match="steps=1: .* is at step 2 already"):
        fit(count, jnp.zeros(24, jnp.int32), Rows(rows, 4), steps=1, checkpoints=tmp_path)
    with pytest.raises(ConfigError, match="batch=4, and these have batch=6"):
        fit(count, jnp.zeros(24, jnp.int32), Rows(rows, 6), steps=3, checkpoints=tmp_path)


def sentences(lengths: list[list[int]]) -> list[Any]:
    """Batches of rows of tokens, of these lengths."""
    drawn = np.random.default_rng(0)
    rows = [[drawn.integers(1, 16, n).astype(np.int32) for n in each] for each in lengths]
    return [{"tokens": each, "labels": [(row * 7) % 16 for row in each], "source": "a"} for each in rows]


def weighted_step(state: Any, batch: Mapping[str, Any]) -> Any:
    """A table of logits by token, trained on the true tokens; counts them."""

    def loss_of(table: Any) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(table[batch["tokens"]], batch["labels"])
        return (losses * batch["weights"]).sum() / batch["weights"].sum()

    loss, gradient = jax.value_and_grad(loss_of)(state["table"])
    tokens = state["tokens"] + batch["weights"].sum().astype(jnp.int32)
    return {"table": state["table"] - gradient, "tokens": tokens}, loss


def test_batches_of_any_lengths_train_as_unpadded_ones_with_a_plan_for_each_bucket(tmp_path: Path):
    lengths = [[3, 4, 2, 4], [7, 5, 8, 1], [2, 2, 1, 1], [12, 1, 3, 4], [6, 6], [1, 4, 4]]  # the last ones are small
    dims = dict.fromkeys(("tokens", "labels", "weights"), ("rows", "length"))
    pad = even_buckets(3, of="length", rows=4, length=12)
    step = autoshard.jit(weighted_step, mesh={"data": 4}, donate_argnums=0)

    def start() -> Any:
        return {"table": jnp.zeros((16, 16)), "tokens": jnp.zeros((), jnp.int32)}

    losses: list[float] = []
    for steps in (4, 6):  # the position is that of the batches, whatever they are padded to
        options: dict[str, Any] = {"checkpoints": tmp_path, "log": lambda _, metrics: losses.append(metrics["loss"])}
        found = fit(step, start(), sentences(lengths), steps=steps, pad=Padding(pad, dims), **options)
    assert "planned for 3 kinds of arguments" in repr(step)

    state = start()
    for batch, loss in zip(sentences(lengths), losses, strict=True):
        whole = {name: np.concatenate(batch[name])[None] for name in ("tokens", "labels")}
        state, wanted = jax.jit(weighted_step)(state, {**whole, "weights": np.ones(whole["tokens"].shape, np.float32)})
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    np.testing.assert_allclose(found["table"], state["table"], rtol=1e-5, atol=1e-7)
    assert int(found["tokens"]) == sum(map(sum, lengths))


def pictured(batch: Any) -> Any:
    """A loss over texts whose image tokens, 0, are the patches of all images in a row: as Qwen2-VL's."""

    def loss_of(params: Any) -> Any:
        is_image = batch["tokens"] == 0
        number = jnp.clip(jnp.cumsum(is_image.ravel()) - 1, 0)
        patches = (batch["patches"] @ params["patch"])[number].reshape(*is_image.shape, 8)
        found = jnp.where(is_image[..., None], patches, params["table"][batch["tokens"]])
        found += params["at"][batch["positions"]].sum(0)
        losses = optax.softmax_cross_entropy_with_integer_labels(found @ params["out"], batch["tokens"])
        return (losses * batch["weights"]).sum() / batch["weights"].sum()

    return loss_of


def pictured_step(params: Any, batch: Any) -> Any:
    loss, gradient = jax.value_and_grad(pictured(batch))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), loss


def test_each_array_of_a_batch_has_its_own_rows():
    """Tokens [batch, seq], positions [3, batch, seq], patches [patches of all images, width], grids [images, 3]."""
    drawn = np.random.default_rng(0)
    params = {"table": (16, 8), "patch": (5, 8), "at": (9, 8), "out": (8, 16)}
    start = {name: drawn.standard_normal(shape, np.float32) / 3 for name, shape in params.items()}
    batches: list[Any] = []
    for rows, length in ((4, 6), (3, 8), (4, 3)):
        tokens, sizes = drawn.integers(1, 16, (rows, length), np.int32), drawn.integers(1, 4, rows)
        tokens[np.arange(length) < sizes[:, None]] = 0
        patches = drawn.standard_normal((int(sizes.sum()), 5), np.float32)
        positions = drawn.integers(0, 9, (3, rows, length), np.int32)
        grid = np.stack([sizes, sizes * 0 + 1, sizes * 0 + 1], 1)
        weights = (tokens != 0).astype(np.float32)
        batches.append({"tokens": tokens, "positions": positions, "patches": patches, "weights": weights, "grid": grid})
    dims = {
        "tokens": ("rows", "length"),
        "weights": ("rows", "length"),
        "positions": (None, "rows", "length"),
        "patches": ("patches",),
        "grid": ("rows",),
    }
    pad = Padding([{"rows": 4, "length": 8, "patches": n} for n in (8, 16)], dims)
    step = autoshard.jit(pictured_step, mesh={"data": 4}, strategy="dp", donate_argnums=0)
    losses: list[float] = []
    found = fit(step, start, batches, steps=3, pad=pad, log=lambda _, metrics: losses.append(metrics["loss"]))
    split = step.plan(start, jax.tree.map(jnp.asarray, pad(batches[0]))).in_specs[1]
    assert (split["tokens"], split["positions"]) == (P("data"), P(None, "data"))
    state: Any = start
    for batch, loss in zip(batches, losses, strict=True):
        state, wanted = jax.jit(pictured_step)(state, batch)
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), found, state)


def test_padding_keeps_the_state_where_the_first_plan_has_it():
    dims = dict.fromkeys(("tokens", "labels", "weights"), ("rows", "length"))
    step = autoshard.jit(weighted_step, mesh={"data": 2, "model": 2}, donate_argnums=0, strategy="fsdp")
    lengths = [[3, 4], [8, 8], [2, 1], [5, 6]]
    pad = Padding(even_buckets(2, of="length", rows=2, length=8), dims)
    first = step.plan(
        start := {"table": jnp.zeros((16, 16)), "tokens": jnp.zeros((), jnp.int32)},
        pad(sentences(lengths)[0]) | {"source": None},
    )
    found = fit(step, start, sentences(lengths), steps=4, pad=pad)
    assert found["table"].sharding.is_equivalent_to(first.in_shardings[0]["table"], 2)
    with pytest.raises(ArgumentError, match="length 9, and no bucket is as large"):
        fit(step, found, sentences([[3, 4], [9, 1]]), steps=2, pad=pad)


def test_no_more_batches_are_taken_than_there_are_steps():
    batches = iter([{"row": np.arange(4) + 4 * n} for n in range(6)])
    for _ in range(2):
        state = fit(count, jnp.zeros(24, jnp.int32), batches, steps=2)
    np.testing.assert_array_equal(state, [0] * 8 + [1] * 8 + [0] * 8)
    assert next(batches)["row"].tolist() == [16, 17, 18, 19]
