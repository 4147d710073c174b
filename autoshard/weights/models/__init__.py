"""models: what computes with published weights, in plain JAX without any sharding; a file for each kind of model.

Input: settings, weights, tokens or pixels. Output: logits. May import: strict_config.
"""
