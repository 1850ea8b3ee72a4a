"""Evaluation: what a model scores at each budget. Import the modules by name; importing this loads no torch."""
