"""Collection of the samples of a step: prompts, completions, rewards and advantages."""
