"""The auditor: every rule is held against the operation itself, on samples, for what is wrong and what is missing."""
