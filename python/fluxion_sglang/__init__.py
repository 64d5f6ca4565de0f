"""Fluxion for SGLang: long contexts with the KV cache in host memory.

Importing this package imports nothing else: that happens inside `import sglang`, in every process of the
environment.
"""

__version__ = "0.1.0"
