"""Registers quantised weights with SGLang, and the layers that hold them."""
