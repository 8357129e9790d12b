"""Compute kernels: row kernels on logits (torch, C++, Triton) and the chunked LM head."""

# Torch registers an operator once per process. The package `kernels` loads copies of this package
# under other names, and each copy needs a separate namespace.
_PACKAGE = __name__.removesuffix(".kernels")
NAMESPACE = "".join(letter if letter.isalnum() else "_" for letter in _PACKAGE)
