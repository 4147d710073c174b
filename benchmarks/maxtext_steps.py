"""MaxText's own steps of the rows of `benchmarks.published` and `benchmarks.experts`, compiled and kept as HLO.

    python -m venv .venv-maxtext
    .venv-maxtext/bin/pip install maxtext==0.2.5 --no-deps
    .venv-maxtext/bin/pip install jax[tpu]==0.12.0.1 flax optax orbax-checkpoint pydantic omegaconf aqtp qwix tokamax \\
        tensorboardx grain ml_collections transformers sentencepiece datasets tiktoken jinja2 sympy drjax jsonlines \\
        pathwaysutils cloud-accelerator-diagnostics ml-goodput-measurement einops pillow psutil
    JAX_PLATFORMS=cpu DECOUPLE_GCLOUD=TRUE .venv-maxtext/bin/python benchmarks/maxtext_steps.py FOLDER [WORD ...]

It runs in that environment, with neither autoshard nor a TPU, and writes a file a row that `benchmarks.published
--maxtext FOLDER` and `benchmarks.experts --maxtext FOLDER` read as they read autoshard's own. Options and compiler
options are those that MaxText's recipes give for TPU v6e, and its scripts for v5e and v5p; those that this version of
the compiler no longer knows are left out.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

COMMON = "compile_topology_num_slices=1 enable_checkpointing=False dataset_type=synthetic use_iota_embed=True"
FLASH = f"{COMMON} attention=flash ici_fsdp_parallelism=-1"
BLOCKS = " ".join(
    f"sa_block_{name}=2048" for name in ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
)
QKV_ON_HOST = "remat_policy=custom decoder_layer_input=offload query_proj=offload key_proj=offload value_proj=offload"
QKVO_ON_HOST = f"{QKV_ON_HOST} out_proj=offload"
SPLASH = f"{FLASH} {BLOCKS} sa_use_fused_bwd_kernel=True max_target_length=8192"

VMEM = "xla_tpu_scoped_vmem_limit_kib=98304"
OVERLAP = "xla_tpu_overlap_compute_collective_tc=true xla_enable_async_all_gather=true"
GATHERS = (
    "xla_tpu_enable_async_collective_fusion=true xla_tpu_enable_async_collective_fusion_fuse_all_gather=true "
    f"xla_tpu_enable_async_collective_fusion_multiple_steps=true {OVERLAP}"
)
"""For v5e; on other chips this version of the compiler refuses the fusion of gathers."""
REDUCTIONS = "xla_tpu_enable_data_parallel_all_reduce_opt=true xla_tpu_data_parallel_opt_different_sized_ops=true"
LAYOUTS = (
    "xla_tpu_use_minor_sharding_for_major_trivial_input=true "
    "xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1 xla_tpu_assign_all_reduce_scatter_layout=true"
)
SPARSE_CORES = (
    "xla_sc_disable_megacore_partitioning=true xla_tpu_enable_all_reduce_offload_tracing=true "
    "xla_tpu_use_tc_device_shape_on_sc=true xla_tpu_enable_sparse_core_collective_offload_all_reduce=true "
    "xla_sc_enable_instruction_fusion=false xla_sc_disjoint_spmem=false"
)
HOST = (
    "xla_tpu_enable_all_experimental_scheduler_features=true xla_tpu_enable_scheduler_memory_pressure_tracking=true "
    "xla_tpu_host_transfer_overlap_limit=24 xla_tpu_aggressive_opt_barrier_removal=ENABLED "
    "xla_lhs_prioritize_async_depth_over_stall=ENABLED xla_tpu_enable_ag_backward_pipelining=true "
    "xla_should_allow_loop_variant_parameter_in_chain=ENABLED xla_should_add_loop_invariant_op_in_chain=ENABLED "
    "xla_max_concurrent_host_send_recv=100 xla_tpu_scheduler_percent_shared_memory_limit=100 "
    "xla_latency_hiding_scheduler_rerun=2"
)
PLAIN_PRODUCTS = "xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000"
DENSE = f"{VMEM} {LAYOUTS} {REDUCTIONS} {OVERLAP}"

EXPERTS = (
    f"{COMMON} use_iota_embed=False attention=flash ici_fsdp_parallelism=-1 model_name=mixtral-8x7b "
    "override_model_config=True remat_policy=full max_target_length=2048 gradient_clipping_threshold=0 "
    "sa_use_fused_bwd_kernel=True "
) + " ".join(f"sa_block_{name}=1024" for name in ("q", "kv", "q_dkv", "kv_dkv"))
DEEPSEEK = (
    "base_emb_dim=2048 base_num_query_heads=16 base_num_kv_heads=16 base_mlp_dim=1408 base_moe_mlp_dim=1408 "
    "vocab_size=102400 num_experts=64 num_experts_per_tok=6"
)
V5P = (
    f"{OVERLAP} {REDUCTIONS} xla_tpu_megacore_fusion_allow_ags=false xla_enable_async_collective_permute=true "
    "xla_tpu_enable_ag_backward_pipelining=true"
)
EXPERT_CELLS = {
    "Mixtral v5e:4x4": (
        "compile_topology=v5e-16 base_num_decoder_layers=4 per_device_batch_size=2",
        f"{GATHERS} {REDUCTIONS}",
    ),
    "Mixtral v5p:4x4x4": ("compile_topology=v5p-128 base_num_decoder_layers=32 per_device_batch_size=4", V5P),
    "DeepSeek v5e:4x4": (
        f"compile_topology=v5e-16 base_num_decoder_layers=8 per_device_batch_size=2 {DEEPSEEK}",
        f"{GATHERS} {REDUCTIONS}",
    ),
    "DeepSeek v5p:4x4x4": (
        f"compile_topology=v5p-128 base_num_decoder_layers=27 per_device_batch_size=4 {DEEPSEEK}",
        V5P,
    ),
}
"""Cells of `benchmarks.experts` -> MaxText's options, and the compiler's."""
EXPERT_FORMS = {
    "megablox, fsdp": ("sparse_matmul=True megablox=True", ""),
    "megablox, ring over 4, all places": (
        "sparse_matmul=True megablox=True ici_expert_parallelism=4 use_ring_of_experts=True",
        "",
    ),
    "megablox, all-to-all over 4, all places": ("sparse_matmul=True megablox=True ici_expert_parallelism=4", ""),
    "megablox, all-to-all over 4, places for 1.25": (
        "sparse_matmul=True megablox=True ici_expert_parallelism=4 ragged_buffer_factor=1.25",
        "",
    ),
    "capacity of 1.25": ("sparse_matmul=False megablox=False capacity_factor=1.25", PLAIN_PRODUCTS),
}
"""What MaxText has for experts: the options of each, and of the compiler those that only it takes."""

ROWS = {
    "Llama-3.1 8B v6e:2x4": (
        f"compile_topology=v6e-8 model_name=llama3.1-8b per_device_batch_size=3 {SPLASH} {QKVO_ON_HOST}",
        f"{DENSE} {SPARSE_CORES} {HOST} {PLAIN_PRODUCTS}",
    ),
    "Llama-3.1 8B v6e:4x8": (
        f"compile_topology=v6e-32 model_name=llama3.1-8b per_device_batch_size=3 {SPLASH} {QKVO_ON_HOST}",
        f"{DENSE} {SPARSE_CORES} {HOST} {PLAIN_PRODUCTS}",
    ),
    "Llama-3.1 8B v6e:16x16": (
        f"compile_topology=v6e-256 model_name=llama3.1-8b per_device_batch_size=4 {SPLASH} {QKVO_ON_HOST}",
        f"{DENSE} {SPARSE_CORES} {HOST}",
    ),
    "Mistral 7B v6e:2x4": (
        f"compile_topology=v6e-8 model_name=mistral-7b per_device_batch_size=6 {SPLASH} {QKVO_ON_HOST}",
        f"{DENSE} {SPARSE_CORES} {HOST} {PLAIN_PRODUCTS}",
    ),
    "Llama-3.1 70B v6e:8x8": (
        f"compile_topology=v6e-64 model_name=llama3.1-70b per_device_batch_size=2 {SPLASH} {QKV_ON_HOST}",
        f"{DENSE} {HOST}",
    ),
    "Llama-3.1 70B v6e:16x16": (
        f"compile_topology=v6e-256 model_name=llama3.1-70b per_device_batch_size=5 {SPLASH} {QKV_ON_HOST}",
        f"{DENSE} {HOST}",
    ),
    "Llama-2 70B v6e:16x16": (
        f"compile_topology=v6e-256 model_name=llama2-70b per_device_batch_size=2 {COMMON} attention=flash "
        "ici_fsdp_parallelism=1 ici_fsdp_transpose_parallelism=-1 remat_policy=qkv_proj_offloaded "
        "max_target_length=4096 sa_block_q=1024 sa_block_q_dkv=2048 sa_block_q_dq=2048",
        f"{VMEM} {OVERLAP} {SPARSE_CORES}",
    ),
    "Mixtral 8x7B v6e:16x16": (
        f"compile_topology=v6e-256 model_name=mixtral-8x7b per_device_batch_size=12 {FLASH} {QKVO_ON_HOST} "
        "max_target_length=4096 sa_block_q=2048 sa_block_q_dkv=2048 sa_block_q_dq=2048 megablox=False "
        "sparse_matmul=False capacity_factor=1.25",
        f"xla_tpu_scoped_vmem_limit_kib=81920 {OVERLAP} {REDUCTIONS}",
    ),
    "Llama-2 7B v6e:8x8": (
        f"compile_topology=v6e-64 model_name=llama2-7b per_device_batch_size=12 {FLASH} remat_policy=full "
        "max_target_length=4096 sa_block_q=1024 sa_block_q_dkv=2048 sa_block_q_dq=2048",
        f"{VMEM} {OVERLAP} {REDUCTIONS}",
    ),
    "GPT-3 175B v6e:16x16": (
        f"compile_topology=v6e-256 model_name=gpt3-175b per_device_batch_size=3 {FLASH} remat_policy=full "
        "max_target_length=2048 sa_block_q=1024 sa_block_q_dkv=2048 sa_block_q_dq=2048",
        f"{VMEM} {OVERLAP} {REDUCTIONS}",
    ),
    "16B v5e:16x16": (
        f"compile_topology=v5e-256 per_device_batch_size=6 {FLASH} remat_policy=full global_parameter_scale=16 "
        "max_target_length=2048",
        f"{GATHERS} {REDUCTIONS}",
    ),
    "32B v5e:16x16": (
        f"compile_topology=v5e-256 per_device_batch_size=4 {FLASH} remat_policy=full global_parameter_scale=32 "
        "max_target_length=2048",
        f"{GATHERS} {REDUCTIONS}",
    ),
    "64B v5e:16x16": (
        f"compile_topology=v5e-256 per_device_batch_size=2 {FLASH} remat_policy=full global_parameter_scale=64 "
        "max_target_length=2048",
        f"{GATHERS} {REDUCTIONS}",
    ),
    "32B v5p:4x4x4": (
        f"compile_topology=v5p-128 per_device_batch_size=6 {FLASH} ici_tensor_parallelism=4 remat_policy=minimal "
        "global_parameter_scale=32 max_target_length=2048",
        f"{OVERLAP} {REDUCTIONS} xla_tpu_megacore_fusion_allow_ags=false xla_enable_async_collective_permute=true "
        "xla_tpu_enable_ag_backward_pipelining=true",
    ),
    "64B v5p:4x4x4": (
        f"compile_topology=v5p-128 per_device_batch_size=3 {FLASH} ici_tensor_parallelism=4 remat_policy=minimal "
        "global_parameter_scale=64 max_target_length=2048",
        f"{OVERLAP} {REDUCTIONS} xla_tpu_megacore_fusion_allow_ags=false xla_enable_async_collective_permute=true "
        "xla_tpu_enable_ag_backward_pipelining=true",
    ),
    **{
        f"{cell} {form}": (f"{EXPERTS} {options} {how}", f"{flags} {more}")
        for cell, (options, flags) in EXPERT_CELLS.items()
        for form, (how, more) in EXPERT_FORMS.items()
    },
}
"""The rows of `benchmarks.published`, and each cell of `benchmarks.experts` in each form -> MaxText's options, and the
compiler's."""


def compile_row(name: str, folder: Path) -> None:
    """Writes what the compiler made of one row: memory, HLO and seconds, or why it was refused, as
    `benchmarks.answers.Answer` holds them."""
    from maxtext.trainers.pre_train import train_compile  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

    options, flags = ROWS[name]
    compile_step = train_compile.jit_and_compile

    def kept(*args: object, **kwargs: object) -> object:
        start = time.perf_counter()
        compiled = compile_step(*args, **kwargs)
        memory = compiled.memory_analysis()
        said = {
            "memory": {k: getattr(memory, k) for k in dir(memory) if k.endswith("bytes")},
            "text": compiled.as_text(),
            "seconds": time.perf_counter() - start,
        }
        keep(folder, name, said)
        return compiled

    train_compile.jit_and_compile = kept
    given = flags.split()
    while True:
        compiler_options = " ".join(f"--{flag}" for flag in given)
        try:
            train_compile.main(["train_compile", *options.split(), f"compile_xla_flags={compiler_options}"])
        except RuntimeError as error:
            unknown = re.search(r"No such compile option: '(\w+)'", str(error))
            if unknown is None:
                keep(folder, name, {"memory": {}, "text": "", "seconds": 0.0, "refusal": str(error)[:2000]})
                raise
            given = [flag for flag in given if not flag.startswith(f"{unknown[1]}=")]
            print(f"the compiler has no option {unknown[1]}", flush=True)
        else:
            return


def keep(folder: Path, name: str, said: Mapping[str, object]) -> None:
    """Writes one row."""
    folder.mkdir(parents=True, exist_ok=True)
    file_of(folder, name).write_bytes(gzip.compress(json.dumps(said).encode()))


def file_of(folder: Path, name: str) -> Path:
    """Where a row is kept."""
    return folder / f"{name.replace(' ', '_').replace(':', '_')}.json.gz"


if __name__ == "__main__":
    target, words = Path(sys.argv[1]), sys.argv[2:]
    (chosen,) = [row for row in ROWS if all(word in row for word in words)]
    compile_row(chosen, target)
