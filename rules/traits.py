"""The traits of JAX's own primitives, of those that passes put in a program, and of `autoshard.annotate`.

`autoshard.ir.traits` defines each trait and names its readers. Every operation has an entry: `KNOWN` gives the traits
of single operations and of families, `NOTHING_KNOWN` lists the operations of which only the rule is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jax.extend.core import Primitive

from autoshard.ir.annotate import annotate_p
from autoshard.ir.traits import UNKNOWN, Traits
from autoshard.rules.builders import table
from autoshard.rules.kept_whole import KEPT_WHOLE
from autoshard.transforms.attention_op import attention_backward_p, attention_p
from autoshard.transforms.grouped_rows import grouped_rows_p
from autoshard.transforms.sum_of_products import sum_of_products_p
from autoshard.transforms.swapped_halves import swapped_halves_p

VIEW = Traits(fused_into_consumer=True, view=True)
"""The operand in another order, shape or dtype, computed where it is read."""
SAME = replace(VIEW, linear=((0,),))
"""The operand as it is, or its elements in another order or shape."""
MOVE = Traits(moves_data=True)
MOVE_ANY = replace(MOVE, any_size=True)
REDUCTION = Traits(reduces=True)
SCATTER = Traits(in_place_operand=0, mispartitioned_by_xla=True, scatters=True)
ITERATION = Traits(iterates_to_convergence=True)
PINNED = replace(VIEW, constrains=True)
POSITIONS = Traits(position_dependent=True)
UNCHECKED = Traits(unchecked_shapes=True)
FOLDED = Traits(folds_scalars=True)

KNOWN: Mapping[str, Traits] = {
    "add": Traits(adds=True, folds_scalars=True, stretches=True, linear=((0, 1),)),
    "add_any": Traits(adds=True, linear=((0, 1),)),
    "argmax": REDUCTION,
    "argmin": REDUCTION,
    "bitcast_convert_type": VIEW,
    "broadcast_in_dim": replace(SAME, any_size=True, broadcasts=True, keeps_constant=True, shape_param="shape"),
    "concatenate": MOVE_ANY,
    "conv_general_dilated": Traits(convolution=True, mispartitioned_by_xla=True),
    "convert_element_type": replace(SAME, casts=True, folds_scalars=True, linear_in_inexact=True),
    "copy": replace(SAME, keeps_constant=True),
    "device_put": Traits(identity=True),
    "div": Traits(folds_scalars=True, stretches=True, linear=((0,),), linear_in_inexact=True),
    "dot_general": Traits(ignores_neutral=True, linear=((0,), (1,))),
    "dynamic_slice": MOVE,
    "dynamic_update_slice": Traits(in_place_operand=0, mispartitioned_by_xla=True),
    "eig": ITERATION,
    "eigh": ITERATION,
    "empty": POSITIONS,
    "fft": Traits(mispartitioned_by_xla=True, row_major_on_cpu=True),
    "gather": Traits(gathers=True, mispartitioned_by_xla=True),
    "geqp3": UNCHECKED,
    "igamma": ITERATION,
    "igamma_grad_a": ITERATION,
    "igammac": ITERATION,
    "integer_pow": FOLDED,
    "iota": Traits(broadcasts=True, fused_into_consumer=True, shape_param="shape"),
    "iota_2x32_shape": POSITIONS,
    "max": replace(FOLDED, stretches=True),
    "min": replace(FOLDED, stretches=True),
    "mul": Traits(folds_scalars=True, stretches=True, linear=((0,), (1,))),
    "name": SAME,
    "neg": Traits(folds_scalars=True, linear=((0,),)),
    "optimization_barrier": replace(VIEW, barrier=True, identity=True),
    "ormqr": UNCHECKED,
    "pad": replace(MOVE, mispartitioned_by_xla=True),
    "pow": replace(FOLDED, stretches=True),
    "pure_callback": Traits(runs_once=True),
    "random_bits": POSITIONS,
    "random_gamma": ITERATION,
    "random_split": POSITIONS,
    "ragged_dot_general": Traits(grouped_product=True),
    "reduce": replace(REDUCTION, mispartitioned_by_xla=True),
    "reduce_and": replace(REDUCTION, ignores_neutral=True, mispartitioned_by_xla=True),
    "reduce_max": replace(REDUCTION, any_size=True, ignores_neutral=True),
    "reduce_min": replace(REDUCTION, any_size=True, ignores_neutral=True),
    "reduce_or": replace(REDUCTION, ignores_neutral=True, mispartitioned_by_xla=True),
    "reduce_prod": replace(REDUCTION, ignores_neutral=True),
    "reduce_sum": replace(REDUCTION, any_size=True, ignores_neutral=True, linear=((0,),)),
    "reduce_window": replace(REDUCTION, mispartitioned_by_xla=True),
    "reduce_window_max": REDUCTION,
    "reduce_window_min": REDUCTION,
    "reduce_window_sum": REDUCTION,
    "reduce_xor": replace(REDUCTION, mispartitioned_by_xla=True),
    "regularized_incomplete_beta": ITERATION,
    "reshape": replace(SAME, any_size=True, keeps_constant=True, shape_param="new_sizes"),
    "rev": Traits(linear=((0,),), moves_data=True, view=True),
    "rng_uniform": Traits(runs_once=True),
    "rsqrt": FOLDED,
    "scan": Traits(loop=True),
    "scatter": SCATTER,
    "scatter-add": replace(SCATTER, scatter_adds=True),
    "scatter-max": SCATTER,
    "scatter-min": SCATTER,
    "scatter-mul": SCATTER,
    "scatter-sub": Traits(mispartitioned_by_xla=True),  # its buffers have not been measured
    "schur": ITERATION,
    "select_and_gather_add": Traits(mispartitioned_by_xla=True),
    "sharding_constraint": PINNED,
    "slice": replace(MOVE_ANY, linear=((0,),)),
    "split": MOVE,
    "sqrt": FOLDED,
    "squeeze": replace(SAME, any_size=True, keeps_constant=True),
    "stack": MOVE,
    "stop_gradient": replace(VIEW, folds_scalars=True),
    "sub": Traits(folds_scalars=True, stretches=True, linear=((0, 1),)),
    "svd": ITERATION,
    "tile": MOVE,
    "transpose": replace(SAME, any_size=True),
    "unstack": MOVE,
    "while": Traits(loop=True),
}
NOTHING_KNOWN = """
abs acos acosh and approx_top_k asin asinh atan atan2 atanh bessel_i0e bessel_i1e call_hi_primitive cbrt ceil cholesky
cholesky_update clamp clz complex cond conj cos cosh cumlogsumexp cummax cummin cumprod cumsum custom_jvp_call
custom_linear_solve custom_vjp_call dce_sink digamma eq eq_to erf erf_inv erfc eval_jaxpr exp exp2 expm1 floor
from_edtype ge geqrf gt hessenberg householder_product imag is_finite jit layout_constraint le le_to lgamma log log1p
log2 logistic lt lt_to lu lu_pivots_to_permutation mulhi ne nextafter not one_minus_square or philox2x32 philox4x32
polygamma polynomial population_count qr random_clone random_fold_in random_seed random_unwrap
random_wrap real reduce_precision rem remat2 reshard rng_bit_generator round scaled_dot select_and_scatter
select_and_scatter_add select_n shard_map shift_left shift_right_arithmetic shift_right_logical sign sin sinh sort
square symmetric_product tan tanh threefry2x32 threefry4x32 tie to_edtype top_k triangular_solve tridiagonal
tridiagonal_solve with_memory_space_constraint xla_metadata_value xor zeta
"""
"""Operations of which nothing is known but their rule or structure. What is kept whole has the same row."""
ROWS: Mapping[str, Traits] = {**dict.fromkeys((*NOTHING_KNOWN.split(), *KEPT_WHOLE), UNKNOWN), **KNOWN}
TRAITS: Mapping[Primitive, Traits] = {
    **table(ROWS),
    annotate_p: PINNED,
    attention_backward_p: UNKNOWN,
    attention_p: UNKNOWN,
    grouped_rows_p: UNKNOWN,
    sum_of_products_p: UNKNOWN,
    swapped_halves_p: Traits(linear=((0,),), moves_data=True),
}
