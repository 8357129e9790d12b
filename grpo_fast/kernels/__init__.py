"""Compute kernels: functions on rows of logits (torch, C++, Triton) and passes over the LM head."""

# Torch registers each operator name only once per process. If a second copy of this package is
# loaded under a different name, as Hugging Face's library `kernels` does, its operators therefore
# need a separate namespace.
_PACKAGE = __name__.removesuffix(".kernels")
NAMESPACE = "".join(letter if letter.isalnum() else "_" for letter in _PACKAGE)
