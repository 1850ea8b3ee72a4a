"""Blocks that have never heard of loops."""
