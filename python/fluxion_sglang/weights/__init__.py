"""Quantised weights: what they are and how the native kernels want them. Nothing here knows of SGLang."""
