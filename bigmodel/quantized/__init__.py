"""Checkpoints published quantised: recognised in their headers, kept as stored, restored where they are computed with.

From bottom to top: `formats` (one file for each: which tensors form a weight, and how it is restored), `linear` and
`experts` (modules that hold the stored tensors and restore them in their forward), `recognise` (which weights of a
checkpoint are stored how), `replace` (puts those modules into a model on meta).
"""
