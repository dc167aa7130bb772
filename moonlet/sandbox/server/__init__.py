"""The sandbox service: the API of E2B over a `Manager`, so that the unmodified `e2b` SDK works with it."""
