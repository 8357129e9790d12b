"""From prompts to advantages: which prompts a step asks, their completions and rewards."""
