"""Weights of a DeepSeek-V4.1 checkpoint: what they are called and shaped, read from disk, made up, and written."""
