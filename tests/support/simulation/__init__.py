"""The seeded simulator: the project's own code on a virtual clock and an in-memory engine, with faults between any two steps."""
