"""Local forms: how one device computes its part of an operation that XLA would gather for, with explicit collectives."""
