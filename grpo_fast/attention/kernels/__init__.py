"""Attention kernels for packed rows, with one provider per file."""
