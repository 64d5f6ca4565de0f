"""The bundled model: its training data, training and examination. `python -m benchmark.needle_model` does it all."""
