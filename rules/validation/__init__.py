"""The auditor: checks every rule against the operation itself, on samples, for what is wrong and what is missing."""
