"""Who computes packed attention: a provider a file."""
