"""The bundled model: training data, training, and examination of its heads. Run it as `python -m
benchmark.needle_model`."""
