"""Files of a run for people: logs, tables, curves and the page of completions."""
