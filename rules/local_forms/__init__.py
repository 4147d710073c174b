"""Local forms: one device's part of operations for which XLA would gather whole operands, with explicit collectives."""
