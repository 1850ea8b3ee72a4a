"""Tasks whose needed depth is known: rows made on the spot, difficulty a parameter. One module a task."""
