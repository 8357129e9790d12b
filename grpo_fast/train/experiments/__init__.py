"""Many runs: a grid of settings with seeds (`compare`), and reward models."""
