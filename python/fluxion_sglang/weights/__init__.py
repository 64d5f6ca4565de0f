"""Quantised weights: the formats of checkpoints, and the format of the native kernels. Nothing here imports SGLang."""
