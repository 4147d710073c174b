"""schedule: the order in which the stages of a pipeline run the micro-batches of a step, as frozen data.

Input: numbers of stages, chunks and micro-batches, seconds of each operation. Output: a `Schedule`, a table of ticks by
stages, checked and drawn; and which layers stages send each other where they store others than they run (`RowMoves`).
Knows nothing of programs, meshes or devices.

May import: errors.
"""
