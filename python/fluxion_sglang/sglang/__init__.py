"""The only package that imports sglang."""
