"""validation: checks every rule against the operation itself, for what is wrong and for what is missing.

In come the rules and samples of every operation; each sample runs whole and in the parts that its rule allows. Out go
findings, each with its evidence. Known gaps have their reasons here as data.

May import: rules, and what they may.
"""
