"""Compute kernels: row kernels on logits (torch, C++, Triton) and the chunked LM head."""

# Torch registers each operator name once per process. A copy of this package that is loaded under a
# different name, as in the published package `kernels`, therefore needs a separate namespace.
_PACKAGE = __name__.removesuffix(".kernels")
NAMESPACE = "".join(letter if letter.isalnum() else "_" for letter in _PACKAGE)
