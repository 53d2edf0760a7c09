"""The mathematics of the offline optimum: which positions to keep when the whole recording is known."""
