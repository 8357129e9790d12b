"""Compute kernels: functions on rows of logits (torch, C++, Triton) and passes over the LM head."""

# Torch registers each operator name only once per process. A second copy of this package, loaded
# under a different name as Hugging Face's library `kernels` does, therefore needs a separate
# operator namespace.
_PACKAGE = __name__.removesuffix(".kernels")
NAMESPACE = "".join(letter if letter.isalnum() else "_" for letter in _PACKAGE)
