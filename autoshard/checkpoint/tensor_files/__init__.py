"""tensor_files: safetensors files: tensors in one file or several with an index, read and written by parts.

A folder has ``model.safetensors``, or ``model-00001-of-00002.safetensors`` and so on with
``model.safetensors.index.json``, which says in which file each tensor is. The library `safetensors` has no numpy dtype
for bfloat16 and 8-bit floats and writes whole tensors only, so files are read and written here; the tests hold them
against it. A file begins with 8 bytes, the length of its header; the header is JSON; tensors follow without a gap.

A tensor is stored row by row, and is read and written in *runs*: boxes of at most `runs.RUN_BYTES` that are contiguous.
The text of a header has digests, `digests`, which other readers pass over.

May import: errors, strict_files, and of checkpoint what knows no format: manifest, pieces.
"""
