"""Several processes: who samples what, shards of weights, collectives."""
