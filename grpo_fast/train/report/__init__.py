"""Output of a run for its user: logs, tables, curves and the page of completions."""
