"""Takes frames from training runs and appends them to the journal; ``main.run`` is a process of it."""
