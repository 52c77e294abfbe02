"""Applications that tests serve with worker processes."""
