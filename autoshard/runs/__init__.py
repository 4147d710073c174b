"""runs: what a training run leaves behind, and what a person watches of it.

Input: events, metrics and reports of a run. Output: its folder with a log, a table, event files for TensorBoard and a
report; the line on the terminal; the list of runs and their curves.

May import: errors, shared_folder, units, strict_files.
"""
