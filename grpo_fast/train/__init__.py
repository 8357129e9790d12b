"""The trainer of the package. Run it with `train(load_recipe("sort"))`."""
