"""The trainer: `train(load_recipe("sort"))`."""
