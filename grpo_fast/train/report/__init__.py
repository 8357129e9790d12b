"""Output of a run for the user: logs, tables, curves and a web page of completions."""
