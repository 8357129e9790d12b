"""Models of a run: policy and reference, with loading and options that save memory."""
