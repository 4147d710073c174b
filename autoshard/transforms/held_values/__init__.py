"""held_values: which values of the forward part the backward part reads as they were made, and which it makes again.

In: a program, and of each value its bytes and the seconds to make it again. Out: the values by the names that the user
knows them by (`names`), the sets of least time within given bytes (`sets`), as numbers of layers (`in_order`), and
loops over layers cut in two, so that layers may differ (`split_scans`). `autoshard.transforms.remat` is the rewrite,
`autoshard.passes.recompute` the pass.

May import: ir, and what it may; transforms.remat.
"""
