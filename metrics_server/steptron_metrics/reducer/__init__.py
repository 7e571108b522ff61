"""From the frames of an iteration to what is kept of it: complete iterations are found, reduced and derived from."""
