"""Damaged files: every mutant of every kind of file that autoshard reads is read, or refused by an error of autoshard.

    python -m tests.fuzz [--mutants 3000] [--seed 0] [--kinds mesh plan ...]

A mutant has bytes changed, a part cut, repeated or moved, or one value or key replaced by an odd one; and some files
are odd from end to end. The exit status is 1 when a mutant raises anything else than an `autoshard.errors` class, or
when one takes longer than `SECONDS`.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import yaml
from etils import epath

import autoshard
from autoshard import checkpoint
from autoshard.backend import compile_cache
from autoshard.checkpoint.manifest import inventory_text, manifest_digest
from autoshard.errors import AutoshardError
from autoshard.machine.hardware import load_hardware
from autoshard.machine.mesh_config import load_mesh_config
from autoshard.runs.report import Event, HeldOutEvent, NonFiniteEvent, PhaseEvent, StepEvent, make_report
from autoshard.runs.run_folder import RunFolder, write_json
from autoshard.train.config import TrainConfig
from autoshard.train.models.decoder import ModelConfig

ROOT = Path(__file__).parent.parent
SECONDS = 2.0
"""Of processor time that reading a file may take."""
HANG = 120
"""Seconds after which the process ends with a traceback."""


@dataclass(frozen=True)
class Kind:
    """One kind of file."""

    name: str
    valid: Sequence[bytes]
    """Files to start from."""
    read: Callable[[bytes], object]
    """Writes the content to its place and does all that reads it."""
    odd: Sequence[bytes] = ()
    """Files that are odd from end to end."""
    values_of: Callable[[bytes], Any] = json.loads
    lines: bool = False
    """Whether each line is JSON; the values are then a list."""


@dataclass
class Outcome:
    """What became of the mutants."""

    counts: Counter[str] = field(default_factory=Counter[str])
    failures: list[str] = field(default_factory=list[str])
    slowest: float = 0.0


BIG = "9" * 5_000
ODD_VALUES: Sequence[Any] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2,
        7,
        2**30,
        2**31,
        2**62,
        2**63,
        2**64,
        10**30,
        10**400,
        -(2**70),
        0.5,
        -0.0,
        1e308,
    ),
    *("", "a", "auto", "x" * 5_000, "\0", "a\0b", "../..", "/", "/dev/zero", "~nobody/x", "gs://bucket/x.yaml"),
    *("1e999GiB", "1e308TiB", "GiB", "9" * 500 + "GB", "1" + " " * 5_000 + "!", "1.2.3KB", "\N{SNOWMAN}", "float33"),
    *("v5e:4x4", "v5e:99999999x99999999", "v5e:0x4", "h100", "cpu", "cpu-8.yaml", "key<fry>", "int4", "object"),
    *([], {}, [[]], [None], [0] * 50, {"": 0}, {"a": {"b": {"c": [1]}}}, ["data", "data"], {"data": 2**30}, [["data"]]),
)
_DEEP = 60_000
ODD_JSON: Sequence[bytes] = (
    *(b"", b" ", b"null", b"[]", b"{}", b"0", b'""', b"NaN", b"[NaN]", b"-", b"{", b'{"a"', b"\xff", b"\xef\xbb\xbf{}"),
    *(b'{"a": 1, "a": 2}', b'{"\\ud800": 1}', b'["\\udc00"]', b'"\x00"', b"1e999", b"[-1e999]", BIG.encode()),
    *(b"[" * _DEEP, b'{"a":' * _DEEP, b"[" * 3_000 + b"]" * 3_000, b"[[" * 200 + b"]]" * 200),
    b"{" + b",".join(b'"k%d": 0' % n for n in range(100_000)) + b"}",
    b'"' + b"a" * 100_000_000 + b'"',
)
ODD_YAML: Sequence[bytes] = (
    *ODD_JSON,
    *(b"axes: " + value for value in (BIG.encode(), b"0x" + b"f" * 100_000, b"0x_", b"0b_", b"1:" * 9_000 + b"1")),
    *(b"axes: {data: " + value + b"}" for value in (BIG.encode(), b"0x" + b"f" * 30, b"1:1:1.5", b".inf", b".nan")),
    *(b"axes: 1:" + b"59:" * 30_000 + b"1.0", b"- " * _DEEP, b"a: " * 100, b"? " * 1_000),
    *(b"axes: !!int abc", b"axes: !!bool maybe", b"axes: !!float x", b"axes: !!map [1]", b"axes: !!timestamp x"),
    *(
        b"axes: !!binary x",
        b"axes: !!python/object/apply:os.system [id]",
        b"axes: !x {}",
        b"!!set {a, b}",
        b"!!omap [1]",
    ),
    *(b"? [a, b]\n: c", b"? {a: b}\n: c", b"{[a]: b}", b"axes: 2001-99-99", b"axes: =", b"<<: {a: 1}", b"a: *b"),
    *(
        b"a: &a [*a]",
        b"a: &a {b: *a}",
        b"&a [*a]",
        b'axes: "\\0"',
        b'axes: "\\ud800"',
        b'"\\ud800": 1',
        b"%YAML 9.9\n---",
    ),
    *(b"--- a\n--- b", b"\x00", b"a: \x07", b"\xfe\xff\x00a", b"a: 'b", b"a: |\n" + b" x\n" * 50_000, b"#" * 200_000),
    b"a: &a [1, 1]\n" + b"".join(b"%c: &%c [*%c, *%c]\n" % (n + 1, n + 1, n, n) for n in range(97, 121)),
    b"a: &a {x: 1}\n" + b"".join(b"%c: &%c {<<: [*%c, *%c]}\n" % (n + 1, n + 1, n, n) for n in range(97, 121)),
    b"".join(b"k%d: 0\n" % n for n in range(100_000)),
    b"".join(b"k%d: 0\n" % n for n in range(4_000)),
    b"".join(b"? k%d\n" % n for n in range(2_000)),
    b"a: " + b"x" * 100_000_000,
)


def in_bytes(content: bytes, draw: random.Random) -> bytes:
    """``content`` with some bytes changed, or a part of it cut, repeated, moved or replaced."""
    a, b = sorted(draw.randrange(len(content) + 1) for _ in range(2))
    b = min(b, a + draw.choice([1, 4, 40, 4_000]))
    part = content[a:b]
    match draw.randrange(7):
        case 0:
            flipped = bytearray(content)
            for _ in range(draw.choice([1, 1, 3, 10])):
                flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
            return bytes(flipped)
        case 1:
            return content[:a] + content[b:]
        case 2:
            return content[:a]
        case 3:
            return content[:a] + part * draw.choice([2, 3, 100]) + content[b:]
        case 4:
            at = draw.randrange(len(content) + 1)
            rest = content[:a] + content[b:]
            return rest[:at] + part + rest[at:]
        case 5:
            return content[:a] + draw.randbytes(draw.choice([1, 3, 20])) + content[b:]
        case _:
            odd = draw.choice(
                [b"[", b"{", b"&a ", b"*a", b"!!int ", b"- ", b"? ", b"<<: ", b"\\ud800", b"1e999", b"\t", b"'", b'"']
            )
            return content[:a] + odd * draw.choice([1, 1, 2, 1_000]) + content[b:]


def in_values(value: Any, draw: random.Random) -> Any:
    """``value`` with one value or key inside it, or itself, replaced, removed, repeated or put elsewhere."""
    places: list[tuple[Any, Any]] = []

    def visit(holder: Any) -> None:
        for key in list(holder if isinstance(holder, dict) else range(len(holder))):
            places.append((holder, key))
            if isinstance(holder[key], dict | list):
                visit(holder[key])

    top = [value]
    visit(top)
    holder, key = draw.choice(places)
    odd = draw.choice(ODD_VALUES)
    match draw.randrange(6):
        case 0 | 1 | 2:
            holder[key] = odd
        case 3:
            del holder[key]
        case 4 if isinstance(holder, dict):
            holder[str(odd)[:5_000]] = holder.pop(key)
        case 4:
            holder.insert(key, holder[key])
        case _:
            other, at = draw.choice(places)
            holder[key] = json.loads(json.dumps(other[at])) if at in other or isinstance(other, list) else odd
    return top[0] if top else None


def mutants(kind: Kind, number: int, draw: random.Random) -> Iterator[bytes]:
    """The odd files of ``kind``, then mutants of the valid ones: ``number`` in all."""
    yield from kind.odd[:number]
    for _ in range(number - len(kind.odd)):
        content = draw.choice(kind.valid)
        if draw.random() < 0.5:
            yield in_bytes(content, draw)
        else:
            mutant, ascii = in_values(kind.values_of(content), draw), draw.random() < 0.5
            lines = mutant if kind.lines and isinstance(mutant, list) else [mutant]
            text = "".join(json.dumps(line, ensure_ascii=ascii) + "\n" for line in lines)
            yield text.encode("utf-8", "surrogatepass")


def run(kind: Kind, number: int, seed: int) -> Outcome:
    """Reads ``number`` mutants of ``kind``, its odd files among them."""
    outcome = Outcome()
    for content in kind.valid:
        kind.read(content)  # for what is compiled or imported once; and it is no mutant: it must be read
    for at, content in enumerate(mutants(kind, number, random.Random(f"{kind.name} {seed}"))):
        faulthandler.dump_traceback_later(HANG, exit=True)
        start = time.process_time()
        try:
            kind.read(content)
            outcome.counts["read"] += 1
        except AutoshardError as error:
            outcome.counts[type(error).__name__] += 1
            if len(str(error)) > 20_000:
                outcome.failures.append(
                    f"{kind.name} {at}: a message of {len(str(error)):,} letters: {content[:200]!r}"
                )
        except Exception as error:
            trace = traceback.extract_tb(error.__traceback__)
            line = next(f for f in reversed(trace) if "site-packages" not in f.filename)
            where = f"{Path(line.filename).name}:{line.lineno}"
            outcome.failures.append(
                f"{kind.name} {at}: {type(error).__name__} at {where}: {str(error)[:200]}: {content[:200]!r}"
            )
        seconds = time.process_time() - start
        outcome.slowest = max(outcome.slowest, seconds)
        if seconds > SECONDS:
            outcome.failures.append(f"{kind.name} {at}: {seconds:.1f} s: {content[:200]!r}")
    faulthandler.cancel_dump_traceback_later()
    return outcome


def kinds(folder: Path) -> Mapping[str, Kind]:
    """Every kind of file, to be written under ``folder``."""
    configs = _configs(folder)
    stored = (*_checkpoints(folder), *_tensors(folder), _orbax(folder))
    found = (*configs, _plan(folder), *stored, _cache_entry(folder), *_run_files(folder))
    return {kind.name: kind for kind in found}


def _configs(folder: Path) -> Iterator[Kind]:
    def mesh(path: Path) -> object:
        return [str(mesh) for mesh in load_mesh_config(path).meshes()]

    def train(path: Path) -> object:
        config = TrainConfig.load(path)
        return config.state_settings(), config.min_devices, config.all_phases

    readers: Mapping[str, Callable[[Path], object]] = {
        "hardware": lambda path: str(load_hardware(str(path))),
        "mesh": mesh,
        "model": ModelConfig.load,
        "train": train,
    }
    for name, reader in readers.items():
        shutil.copytree(ROOT / "configs" / name, folder / "configs" / name)
        path = folder / "configs" / name / "mutant.yaml"
        yield Kind(
            name,
            [file.read_bytes() for file in sorted((ROOT / "configs" / name).glob("*.yaml"))],
            _writes(path, reader),
            ODD_YAML,
            values_of=yaml.safe_load,
        )


def _plan(folder: Path) -> Kind:
    def step(state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda w: (jnp.tanh(x @ w["a"]) @ w["b"]).mean())(state["w"])
        return {"w": jax.tree.map(lambda w, g: w - g, state["w"], grads), "n": (state["n"][0] + 1,)}, loss

    shape = jax.ShapeDtypeStruct
    w = {"a": shape((16, 32), jnp.float32), "b": shape((32, 16), jnp.bfloat16)}
    state, x = {"w": w, "n": (shape((), jnp.int32),)}, shape((32, 16), jnp.float32)
    plans = [
        autoshard.jit(step, mesh=mesh, donate_argnums=0, strategy=strategy).plan(state, x)
        for strategy, mesh in (
            ("auto", {"data": 4, "model": 2}),
            ("zero1", {"data": 8}),
            ("fsdp_tp", autoshard.MeshConfig(axes={"data": 2, "model": 8}, tpu="v5e:4x4")),
        )
    ]

    def read(path: Path) -> object:
        plan = autoshard.Plan.load(path)
        return plan.explain(), str(plan), plan == plans[0], plan.to_json()

    valid = [json.dumps(plan.to_json(), indent=1).encode() for plan in plans]
    return Kind("plan", valid, _writes(folder / "plan.json", read), ODD_JSON)


def _checkpoints(folder: Path) -> Iterator[Kind]:
    state = {
        "w": jnp.ones((4, 2)),
        "narrow": jnp.zeros((3,), jnp.uint4),
        "none": jnp.zeros((0, 2)),
        "key": jax.random.key(0),
        "scalars": (True, 7, 0.5, "text"),
    }
    root = folder / "checkpoints"
    checkpoint.save(root, 1, state, extra={"batches": {"position": [1, 2]}}, wait=True)

    def read(_: Path) -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint.steps(root)
            plain = checkpoint.restore(root)
            return plain, checkpoint.restore(root, like=state)

    manifest, inventory = root / "1/manifest/metadata", root / "1/inventory.json"
    sizes = inventory.read_bytes()

    def as_listed(path: Path) -> object:
        """As `read`: a manifest of another digest than it says itself, or the inventory, would be refused for that."""
        with contextlib.suppress(RecursionError, ValueError):
            content = json.loads(manifest.read_bytes())
            if isinstance(content, dict) and "digest" in content:
                manifest.write_text(json.dumps(content | {"digest": manifest_digest(content)}))
        inventory.write_text(inventory_text(epath.Path(root / "1")))
        return read(path)

    yield Kind("manifest", [manifest.read_bytes()], _writes(manifest, as_listed, restore=True), ODD_JSON)
    inventory.write_bytes(sizes)
    yield Kind("inventory", [sizes], _writes(inventory, read, restore=True), ODD_JSON)


def _tensors(folder: Path) -> Iterator[Kind]:
    """The header of a safetensors file, and the index of several."""
    state = {
        "a": jnp.ones((4, 2)),
        "b": jnp.zeros((3,), jnp.bfloat16),
        "key": jax.random.key(0),
        "e": jnp.zeros((0, 2)),
    }
    root = folder / "tensors"
    checkpoint.to_safetensors(root, state, max_bytes=32)
    index, file = root / "model.safetensors.index.json", root / "model-00002-of-00002.safetensors"
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")

    def read(_: Path) -> object:
        return checkpoint.from_safetensors(root), checkpoint.from_safetensors(root, like=state)

    def with_length(path: Path) -> object:
        header = path.read_bytes()
        path.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
        return read(path)

    yield Kind("safetensors", [content[8:end]], _writes(file, with_length, restore=True), ODD_JSON)
    yield Kind("safetensors-index", [index.read_bytes()], _writes(index, read, restore=True), ODD_JSON)


def _orbax(folder: Path) -> Kind:
    """The metadata of a folder that Orbax wrote by itself."""
    root = folder / "orbax"
    state = {"w": jnp.ones((4, 2)), "n": 3, "key": jax.random.key(0), "text": "abc"}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(root, state)
    path = root / "_METADATA"

    def read(_: Path) -> object:
        return checkpoint.restore(root), checkpoint.restore(root, like=state, missing="keep", extra="ignore")

    return Kind("orbax", [path.read_bytes()], _writes(path, read, restore=True), ODD_JSON)


def _cache_entry(folder: Path) -> Kind:
    key = "0" * 32
    entry = compile_cache.CachedCompilation(key=key, usage=None, out_of_memory=None, estimate=None)

    def read(_: Path) -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", autoshard.errors.CacheWarning)
            return compile_cache.load(folder / "cache", key)

    path = folder / "cache" / f"{key}.json"
    return Kind("cache", [entry.model_dump_json(indent=1).encode()], _writes(path, read), ODD_JSON)


def _run_files(folder: Path) -> Iterator[Kind]:
    run_folder = RunFolder(epath.Path(folder / "run"))
    settings = TrainConfig.load(ROOT / "configs/train/demo.yaml").state_settings()
    run_folder.claim(settings)
    (run_folder.checkpoints / "4").mkdir(parents=True)
    given: dict[str, Any] = {
        "parameters": 1,
        "held_out": 1.0,
        "bigram_bits": 2.0,
        "scored": 9,
        "unit": "tokens",
        "checkpoint": "run/4",
    }
    log: list[Event] = []
    for first, mesh in ((0, "(data=4)"), (2, "(data=2)")):
        log.append(PhaseEvent(step=first, mesh=mesh, collectives="all-reduce over data"))
        taken = (first + 1, first + 2)
        log += [StepEvent(step=n, loss=1.0 / n, grad_norm=0.5, learning_rate=1e-3) for n in taken]
        log.append(HeldOutEvent(step=first + 2, loss=1.5))
    found: dict[str, Any] = {"metrics": ("loss",), "state": (), "batch": (), "processes": (), "did": "skip"}
    run_folder.append([*log, NonFiniteEvent(step=4, **found)])
    report = make_report(log, steps=4, **given)
    write_json(run_folder.report, report.model_dump(mode="json"))

    def events(_: Path) -> object:
        run_folder.drop_events_after(4)
        return str(make_report(run_folder.events(), steps=4, **given))

    readers: Mapping[str, Callable[[Path], object]] = {
        "run": lambda _: run_folder.claim(settings),
        "log": events,
        "report": lambda _: str(run_folder.finished(4)),
    }
    for name, file in (("run", "run.json"), ("log", "log.jsonl"), ("report", "report.json")):
        path = folder / "run" / file
        kind = Kind(name, [path.read_bytes()], _writes(path, readers[name]), ODD_JSON)
        yield replace(kind, values_of=_json_lines, lines=True) if name == "log" else kind


def _json_lines(content: bytes) -> list[Any]:
    return [json.loads(line) for line in content.splitlines()]


def _writes(path: Path, read: Callable[[Path], object], *, restore: bool = False) -> Callable[[bytes], object]:
    """Writes to ``path`` and reads that; with ``restore`` the file there before comes back afterwards."""
    before = path.read_bytes() if restore else b""

    def written(content: bytes) -> object:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        try:
            return read(path)
        finally:
            if restore:
                path.write_bytes(before)

    return written


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mutants", type=int, default=3_000, help="of all kinds together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", default=())
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        every = kinds(Path(folder))
        chosen = [every[name] for name in given.kinds or every]
        failures: list[str] = []
        for kind in chosen:
            outcome = run(kind, -(-given.mutants // len(chosen)), given.seed)
            failures += outcome.failures
            counts = ", ".join(f"{n} {name}" for name, n in sorted(outcome.counts.items()))
            print(
                f"{kind.name}: {counts}; slowest {outcome.slowest:.2f} s; {len(outcome.failures)} failures", flush=True
            )
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
