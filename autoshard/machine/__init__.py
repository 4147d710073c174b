"""machine: what planning knows of a machine, without its devices.

In come mesh configurations, hardware tables in YAML, and the names of TPU slices and GPU clusters. Out goes a
`LogicalMesh`: named axes, the chip's figures, the link that each axis runs over, and with `collective_seconds` the
price of one collective on those links. Only `LogicalMesh.concrete` looks for devices.

May import: errors, units, strict_config.
"""
