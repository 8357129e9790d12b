"""Code that collects the samples of a training step: prompts, completions, rewards, advantages."""
