"""The subject: where a loop starts, what it sees of the last loop's state, and the loop itself."""
