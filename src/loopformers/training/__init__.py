"""Training: optimisers, learning-rate schedules, the trainer. Import the modules by name: this one loads no torch."""
