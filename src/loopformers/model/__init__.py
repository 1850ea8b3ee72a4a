"""The model: configuration, presets, cache, transformers face, conversion of official checkpoints."""
