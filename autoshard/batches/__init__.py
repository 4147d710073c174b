"""batches: batches on their way from where they are read to the devices.

Input: batches of numpy arrays, of any sizes. Output: the same padded to one of a few sizes, and on the devices before
they are asked for.

May import: errors, strict_files.
"""
