"""Compute kernels: row kernels on logits (torch, C++, Triton) and the chunked LM head."""
