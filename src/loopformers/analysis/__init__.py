"""Analysis: what a training run's curves say. Import the modules by name; importing this loads nothing."""
