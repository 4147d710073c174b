"""The roofline of compiled instructions: products, bytes, slices of large operands, loops."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.backend.hlo.roofline import memory_bound_seconds, roofline_seconds
from autoshard.backend.hlo.text import parse_hlo
from autoshard.machine.mesh import AttentionRates, Hardware, Link
from autoshard.transforms.attention_kernels import peak_share

LINKS = {"near": Link("near", 1e9, 0.0)}
FAST_MEMORY = Hardware("chip", {"bfloat16": 1e3, "float32": 1e2}, 1e9, 1e30, LINKS)
FAST_PRODUCTS = Hardware("chip", {"float32": 1e30}, 1e9, 1e2, LINKS)


def module(entry, *others):
    body = "\n".join(f"  {line}" for line in entry)
    text = "HloModule test\n\n" + "".join(f"{o}\n\n" for o in others)
    return parse_hlo(f"{text}ENTRY %main (a: f32[8]) -> f32[8] {{\n{body}\n}}\n")


def seconds(hardware, entry, *others):
    return roofline_seconds(module(entry, *others), hardware)


OPERANDS = ("%a = TYPE[4,8] parameter(0)", "%b = TYPE[8,16] parameter(1)")


@pytest.mark.parametrize(
    ("dtype", "product"),
    [
        ("f32", "%d = f32[4,16] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"),
        ("bf16", "%d = f32[4,16] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"),
        ("f32", '%d = f32[4,16] custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend'
         '_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}'),
        ("f32", "%d = f32[4,16] convolution(%a, %b), dim_labels=bf_io->bf"),
    ],
    ids=["dot", "bfloat16", "gemm", "convolution"],
)  # fmt: skip
def test_products_run_at_the_peak_of_their_operands_dtype(dtype, product):
    lines = [line.replace("TYPE", dtype) for line in OPERANDS]
    peak = {"f32": 1e2, "bf16": 1e3}[dtype]
    assert seconds(FAST_MEMORY, [*lines, product])[0] == pytest.approx(2 * 4 * 8 * 16 / peak)


@pytest.mark.parametrize(
    ("target", "left", "right", "result"),
    [
        ("Forward", "2,9,9,3", "5,3,3,3", "2,4,4,5"),
        ("BackwardInput", "2,4,4,5", "5,3,3,3", "2,9,9,3"),
        ("BackwardFilter", "2,9,9,3", "2,4,4,5", "5,3,3,3"),
    ],
)
def test_gradients_of_a_convolution_have_its_flops(target, left, right, result):
    """A stride of two: a kernel of 3x3 from 3 to 5 features at each of 2x4x4 places."""
    call = f'dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv{target}"'
    lines = [f"%a = f32[{left}] parameter(0)", f"%b = f32[{right}] parameter(1)"]
    product = f"ROOT %c = (f32[{result}], u8[0]) custom-call(%a, %b), {call}"
    assert seconds(FAST_MEMORY, [*lines, product])[0] == pytest.approx(2 * (2 * 4 * 4 * 5) * (3 * 3 * 3) / 1e2)


@pytest.mark.parametrize("stride", [1, 2])
def test_holes_of_a_dilated_operand_are_not_multiplied(stride):
    """The gradient of the input of a strided convolution, as XLA's own count of its FLOPs has it, but for the edges."""
    dilated = f"size=3x3 pad=1_{stride}x1_{stride} lhs_dilate={stride}x{stride} rhs_reversal=1x1"
    size = 16 * stride
    lines = ["%a = f32[2,16,16,5] parameter(0)", "%b = f32[3,3,3,5] parameter(1)"]
    window = f"window={{{dilated}}}, dim_labels=b01f_01oi->b01f"
    product = f"ROOT %c = f32[2,{size},{size},3] convolution(%a, %b), {window}"
    flops = 2 * (2 * size * size * 3) * (3 * 3 * 5) / stride**2
    assert seconds(FAST_MEMORY, [*lines, product])[0] == pytest.approx(flops / 1e2, rel=0.01)


@pytest.mark.parametrize(
    ("mask", "window", "queries", "keys", "computed"),
    [("NO_MASK", 0, 16, 32, 1), ("CAUSAL", 0, 984, 984, 0.625), ("CAUSAL", 246, 984, 984, 0.5)],
)
@pytest.mark.parametrize(("target", "products", "share"), [("Softmax", 2, 0.5), ("SoftmaxBackward", 5, 0.25)])
def test_cudnn_attention_runs_at_its_share_of_the_peak(target, products, share, mask, window, queries, keys, computed):
    """Of 2 sequences, in 4 heads; a quarter as many scores as it excludes, the kernel computes below a causal mask."""
    shape = f'{{"element_type": "BF16", "dimensions": ["2", "4", "{queries}", "{keys}"]}}'
    masked = f'"mask_type": "{mask}", "sliding_window_length": {window}'
    config = f'{{"fmha_scale": 1, "intermediate_tensor_shape": {shape}, {masked}}}'
    sizes = (("q", queries), ("k", keys), ("v", keys))
    lines = [f"%{x} = bf16[2,{n},4,128] parameter({i})" for i, (x, n) in enumerate(sizes)]
    call = f'custom-call(%q, %k, %v), custom_call_target="__cudnn$fmha{target}", backend_config={config}'
    kernel = f"ROOT %c = (bf16[2,4,{queries},128], f32[2,4,{queries}], u8[0]) {call}"
    flops = products * 2 * (2 * 4 * queries * keys) * 128 * computed
    slow = replace(FAST_MEMORY, attention=AttentionRates("cudnn", 0.5, 0.25))
    assert seconds(slow, [*lines, kernel])[0] == pytest.approx(flops / 1e3 / peak_share("cudnn", share, keys))
    moved = 2 * 4 * 128 * 2 * (2 * queries + 2 * keys) + 2 * 4 * queries * 4
    assert seconds(FAST_PRODUCTS, [*lines, kernel])[0] == pytest.approx(moved / 1e2)


def test_products_convolutions_and_memory_run_at_their_shares():
    lines = [line.replace("TYPE", "f32") for line in OPERANDS]
    product = "ROOT %d = f32[4,16] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    images = ["%a = f32[2,16,16,5] parameter(0)", "%b = f32[1,1,5,3] parameter(1)"]
    window = "window={size=1x1}, dim_labels=b01f_01io->b01f"
    convolution = f"ROOT %c = f32[2,16,16,3] convolution(%a, %b), {window}"
    for given, text, part in ((lines, product, "product_efficiency"), (images, convolution, "convolution_efficiency")):
        whole = seconds(FAST_MEMORY, [*given, text])[0]
        assert seconds(replace(FAST_MEMORY, **{part: 0.5}), [*given, text])[0] == pytest.approx(2 * whole)
        moved = seconds(FAST_PRODUCTS, [*given, text])[0]
        assert seconds(replace(FAST_PRODUCTS, memory_efficiency=0.5), [*given, text])[0] == pytest.approx(2 * moved)


def test_a_product_inside_a_fusion_counts_once():
    inner = "\n  ".join(
        (
            "%inner (a: f32[4,8], b: f32[8,16]) -> f32[4,16] {",
            *(line.replace("TYPE", "f32") for line in OPERANDS),
            "ROOT %d = f32[4,16] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n}",
        )
    )
    lines = [line.replace("TYPE", "f32") for line in OPERANDS]
    fused = [*lines, "ROOT %f = f32[4,16] fusion(%a, %b), kind=kOutput, calls=%inner"]
    assert seconds(FAST_MEMORY, fused, inner)[0] == pytest.approx(2 * 4 * 8 * 16 / 1e2)
    moved = (4 * 8 + 8 * 16 + 4 * 16) * 4
    assert seconds(FAST_PRODUCTS, fused, inner)[0] == pytest.approx(moved / 1e2)


def test_a_slice_of_a_large_operand_reads_the_slice():
    large, i = "%x = f32[1000,8] parameter(0)", "%i = s32[] parameter(1)"
    taken = "ROOT %s = f32[1,8] dynamic-slice(%x, %i, %i), dynamic_slice_sizes={1,8}"
    assert seconds(FAST_PRODUCTS, [large, i, taken])[0] == pytest.approx((2 * 8 * 4 + 2 * 4) / 1e2)
    put = ["%u = f32[1,8] parameter(2)", "ROOT %s = f32[1000,8] dynamic-update-slice(%x, %u, %i, %i)"]
    assert seconds(FAST_PRODUCTS, [large, i, *put])[0] == pytest.approx((2 * 8 * 4 + 2 * 4) / 1e2)


@pytest.mark.parametrize(
    ("rows", "columns", "taken", "read"),
    [
        (1000, 8, (1, 8), 4 * 512),  # a granule each
        (1000, 4096, (1, 4096), 4 * 4096 * 4),
        (16, 8, (1, 8), 16 * 8 * 4),  # no more than there is
    ],
)
def test_a_gather_reads_what_it_takes(rows, columns, taken, read):
    given = [f"%x = f32[{rows},{columns}] parameter(0)", "%i = s32[4,1] parameter(1)"]
    sizes = ",".join(map(str, taken))
    gather = f"ROOT %g = f32[4,{columns}] gather(%x, %i), offset_dims={{1}}, slice_sizes={{{sizes}}}"
    moved = read + 4 * 4 + 4 * columns * 4
    assert seconds(FAST_PRODUCTS, [*given, gather])[0] == pytest.approx(moved / 1e2)


def test_an_update_in_place_moves_the_update_behind_a_bitcast_and_in_a_tuple():
    body = (
        "%put (x: f32[8,1000], u: f32[1,8], i: s32[]) -> (f32[1000,8], f32[1,8]) {\n  %x = f32[8,1000] parameter(0)\n"
        "  %y = f32[1000,8] bitcast(%x)\n  %u = f32[1,8] parameter(1)\n  %i = s32[] parameter(2)\n"
        "  %s = f32[1000,8] dynamic-update-slice(%y, %u, %i, %i)\n  ROOT %t = (f32[1000,8], f32[1,8]) tuple(%s, %u)\n}"
    )
    given = ["%x = f32[8,1000] parameter(0)", "%u = f32[1,8] parameter(1)", "%i = s32[] parameter(2)"]
    fused = "ROOT %f = (f32[1000,8], f32[1,8]) fusion(%x, %u, %i), kind=kLoop, calls=%put"
    moved = 8 * 4 + 4 + 2 * 8 * 4  # the slice and its place are read, and the slice is written twice
    assert seconds(FAST_PRODUCTS, [*given, fused], body)[0] == pytest.approx(moved / 1e2)


@pytest.mark.parametrize(("called", "moved"), [("AllocateBuffer", 2 * 8 * 4 + 4), ("another", None)])
def test_an_update_of_an_empty_buffer_is_a_sweep_over_the_update(called, moved):
    body = (
        "%put (u: f32[1,8], i: s32[]) -> f32[1000,8] {\n  %u = f32[1,8] parameter(0)\n  %i = s32[] parameter(1)\n"
        f'  %x = f32[1000,8] custom-call(), custom_call_target="{called}"\n'
        "  ROOT %s = f32[1000,8] dynamic-update-slice(%x, %u, %i, %i)\n}"
    )
    given = ["%u = f32[1,8] parameter(0)", "%i = s32[] parameter(1)"]
    whole = module([*given, "ROOT %f = f32[1000,8] fusion(%u, %i), kind=kLoop, calls=%put"], body)
    main = whole.computations["main"]
    found = memory_bound_seconds(main.instructions["f"], main, whole, FAST_PRODUCTS)
    assert found == (moved and pytest.approx(moved / 1e2))


@pytest.mark.parametrize(
    ("depth", "made", "window", "bound"),
    [
        (96, 768, "window={size=1x1}", True),
        (96, 768, "operand_precision={default,default}", True),
        (4096, 4096, "window={size=1x1}", False),  # takes longer than its bytes
        (96, 768, "window={size=3x3 pad=1_1x1_1}", False),
        (96, 768, "window={size=11x11}", False),
        (96, 768, "window={size=1x1 stride=2x2}", False),
        (96, 768, "window={size=1x1}, feature_group_count=4", False),
        (96, 768, "window={size=1x1}, operand_precision={highest,highest}", False),
    ],
)
def test_a_product_that_memory_bounds_takes_its_bytes(depth, made, window, bound):
    """On whole tiles of 256 at the peak of this chip, the narrow one takes less than its bytes do."""
    chip = Hardware("chip", {"bfloat16": 197e12}, 1e9, 0.8e12, LINKS, tile=(8, 128))
    x, w, y = (f"bf16[{s}]" for s in (f"56,56,32,{depth}", f"{depth},{made},1,1", f"56,56,32,{made}"))
    given = [f"%x = {x} parameter(0)", f"%w = {w} parameter(1)"]
    product = f"%y = {y} convolution(%x, %w), {window}, dim_labels=01bf_io01->01bf"
    lines = [*given, product, f"ROOT %t = {y} tanh(%y)\n}}"]
    inner = "\n  ".join((f"%inner (x: {x}, w: {w}) -> {y} {{", *lines))
    whole = module([*given, f"ROOT %f = {y} fusion(%x, %w), kind=kOutput, calls=%inner"], inner)
    main = whole.computations["main"]
    moved = 2 * (56 * 56 * 32 * (depth + made) + depth * made)
    found = memory_bound_seconds(main.instructions["f"], main, whole, chip)
    assert found == (pytest.approx(moved / 0.8e12) if bound else None)


def test_free_instructions_and_collectives_take_no_time():
    lines = [
        "%a = f32[8] parameter(0)",
        "%t = (f32[8]) tuple(%a)",
        "%g = f32[8] get-tuple-element(%t), index=0",
        "%s = f32[8] all-gather-start(%g), replica_groups={}",
        "ROOT %r = f32[8] all-gather-done(%s)",
    ]
    assert seconds(FAST_PRODUCTS, lines) == (0.0, True)


def test_an_asynchronous_fusion_moves_the_same_bytes():
    fused = (
        "%put (x: f32[1000,8], u: f32[1,8], i: s32[]) -> f32[1000,8] {\n  %x = f32[1000,8] parameter(0)\n"
        "  %u = f32[1,8] parameter(1)\n  %i = s32[] parameter(2)\n"
        "  ROOT %s = f32[1000,8] dynamic-update-slice(%x, %u, %i, %i)\n}"
    )
    called = (
        "%beside (x: f32[1000,8], u: f32[1,8], i: s32[]) -> f32[1000,8] {\n  %x = f32[1000,8] parameter(0)\n"
        "  %u = f32[1,8] parameter(1)\n  %i = s32[] parameter(2)\n"
        "  ROOT %f = f32[1000,8] fusion(%x, %u, %i), kind=kLoop, calls=%put\n}"
    )
    given = ["%x = f32[1000,8] parameter(0)", "%u = f32[1,8] parameter(1)", "%i = s32[] parameter(2)"]
    start = "%a = ((f32[1000,8], f32[1,8], s32[]), f32[1000,8]) fusion-start(%x, %u, %i), calls=%beside"
    done = "ROOT %d = f32[1000,8] fusion-done(%a)"
    alone = "ROOT %f = f32[1000,8] fusion(%x, %u, %i), kind=kLoop, calls=%put"
    beside = seconds(FAST_PRODUCTS, [*given, start, done], fused, called)[0]
    assert beside == pytest.approx(seconds(FAST_PRODUCTS, [*given, alone], fused)[0])
    assert beside < 2
