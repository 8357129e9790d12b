"""The files that a run leaves for people: logs, tables, curves, the page of completions."""
