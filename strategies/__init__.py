"""Where programs come from: machines, walkers, replay, shrinking."""
