"""processes: one run in several processes.

In: the command that each runs, on one machine (`launch`) or where a cluster starts it. Out: processes that are
connected (`connection`) and know of each other (`peers`), agree on what they do (`agreement`), bring their rows of each
batch (`placing`), and meet again and again (`meeting`).

May import: batches, runs, runtime, shared_folder, and what they may; sources and stop_signals of train.
"""
