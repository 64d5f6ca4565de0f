"""Kernels and tasks in torch, straight from their definitions: the reference for the native code."""
