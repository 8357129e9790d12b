"""Training on the samples of a step: packing, gradients, critic, optimizer and memory budget."""
