"""The models of a run: policy, reference, their loading and memory options."""
