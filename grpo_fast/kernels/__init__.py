"""Compute kernels: row kernels on logits (torch, C++, Triton) and the chunked LM head."""

import re

# Torch registers an operator once per process. The package `kernels` loads copies of this package
# under other names, and each copy needs a separate namespace.
NAMESPACE = re.sub(r"\W", "_", __name__.removesuffix(".kernels"))
