"""models: what computes with published weights, in plain JAX without any sharding; a file for each kind of model.

Input: settings, weights, tokens or pixels, and with `cache` what was kept of earlier tokens. Output: logits.
May import: errors, strict_config.
"""
