"""From a batch of completions to an optimizer step: gradients, critic, memory budget."""
