"""What SGLang is told about quantised weights, and the layers that hold them."""
