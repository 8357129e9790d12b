"""Models of a run: policy and reference, their loading, and options that save memory."""
