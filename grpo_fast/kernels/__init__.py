"""Kernels: rows of logits (torch, C++, Triton) and the chunk loop from hidden states."""
