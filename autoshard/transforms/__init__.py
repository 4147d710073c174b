"""transforms: from one valid program to another.

In comes a `Program`, out goes a `Program` with the same arguments and results. Here are the contract of a pass and the
pipeline that runs and checks passes, and the rewrites that several passes share: rematerialization, and the primitives
that passes put in place of many equations (attention, sum of products). The passes that a user can name are
`autoshard.passes`.

May import: ir, and what it may.
"""
