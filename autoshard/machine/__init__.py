"""machine: device meshes and hardware as planning sees them, without devices.

Input: mesh configs, YAML hardware tables, and names of TPU slices and GPU clusters. Output: a `LogicalMesh` (named
axes, the chip's peak rates and memory, the interconnect of each axis), and `collective_seconds`, the predicted time of
one collective on it. Only `LogicalMesh.concrete` needs devices, or a compiler that describes them.

May import: errors, units, strict_config.
"""
