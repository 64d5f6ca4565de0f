"""Fluxion for SGLang: long contexts with the KV cache in host memory.

Importing this package imports nothing else. The modules are loaded during `import sglang`, in every process of the
environment.
"""

__version__ = "0.1.0"
