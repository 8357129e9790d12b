"""A race on a real model: the time until a held-out accuracy is reached, by three trainers."""
