"""Measurements: of the allocators against released ones, and of the harness against itself."""
